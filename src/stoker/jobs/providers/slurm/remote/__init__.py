"""Uses a cluster through ssh: the connection, the files of a submission, and a copy of the logs."""
