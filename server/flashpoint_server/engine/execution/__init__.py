"""The executor runs tasks on the device and sends answers."""
