"""Observe which files and environment variables the user's code reads while it runs.

The source does not show what is read: a path can be computed, and NumPy, PyArrow, OpenCV, HDF5 and
TensorFlow read files in C. Below the user's folder reads are observed with inotify (Linux), which
sees every reader, but not which process it is: reads by other processes count, too. Outside the
folder they are observed with Python's audit hook, which sees only files that Python itself opens.
Environment variables are observed through `os.environ`.

A file counts with its content at the start of the run. A file that did not exist then, or was
written before it was read, belongs to the run and never counts. File times are not used for that
decision. A variable counts with its value, unless the code itself has set it. A folder below the
user's folder that is listed counts with the names in it (`folder_files`).
"""
