"""The machine: devices, files and console."""
