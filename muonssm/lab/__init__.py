"""The lab: trains, compares and explains models built from the library. One folder per task, `core` is shared."""
