"""Synthetic memory tests: associative recall, selective copying, induction heads, passkey."""

TASKS = {"recall": "task.RecallTask"}
EXTRA = "language"
