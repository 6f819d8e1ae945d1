"""What was learned: memory, classifiers, recognizer, metrics."""
