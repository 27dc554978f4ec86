"""Language modeling: pre-training, instruction tuning, generation, and zero-shot and needle evaluation."""

TASKS = {"language": "task.LanguageTask"}
EXTRA = "language"
