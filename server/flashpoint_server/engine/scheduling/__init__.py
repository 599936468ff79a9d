"""The scheduler: entries, their queue and order, and the tasks that it chooses."""
