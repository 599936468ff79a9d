"""The executor: tasks run on the device, and answers are sent."""
