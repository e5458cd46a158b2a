"""Observe which files and environment variables the user's code reads while it runs.

The source does not show what is read: a path can be computed, and NumPy, PyArrow, OpenCV, HDF5 and TensorFlow read
files in C. In the user's folder, reads are observed with inotify (Linux). It reports every read, but not which process
has read, so reads by other processes are recorded, too. Outside the folder, reads are observed with Python's audit
hook, which sees only files that Python itself opens. Environment variables are observed through `os.environ`.

The inputs of a run are: the files that it reads, with their content at the start of the run; the environment variables
that it reads, with their values, unless the code itself has set them; and the folders in the user's folder that it
lists, with the names in them (`folder_files`). A file that did not exist at the start, or that the run writes, is a
file of the run and never an input, even if the run reads it before it writes it. A file in the user's folder is not an
input either if its size or its time has changed between the start and the first read.
"""
