"""What a model asks of a device, and what the device does: operations, peak, MFU, kernel time."""
