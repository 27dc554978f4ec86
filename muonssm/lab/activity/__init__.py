"""Activity recognition: sensor windows in, one class out."""

TASKS = {"activity": "task.ActivityTask"}
EXTRA = "activity"
