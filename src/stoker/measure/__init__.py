"""What a device is given to do and what it does: operations, peak, MFU, time by kernel class."""
