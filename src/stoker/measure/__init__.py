"""The operations that a model needs, and what the device does: peak rate, MFU, kernel time."""
