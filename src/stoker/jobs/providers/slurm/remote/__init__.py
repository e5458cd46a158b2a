"""A cluster behind ssh: the connection, the files of a submission, a copy of the logs."""
