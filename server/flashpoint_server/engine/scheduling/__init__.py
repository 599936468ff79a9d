"""The scheduler: requests, their queue and order, and the tasks that it chooses."""
