"""Language modelling: pre-training, instruction tuning, generation and zero-shot evaluation."""

TASKS = {"language": "task.LanguageTask"}
EXTRA = "language"
