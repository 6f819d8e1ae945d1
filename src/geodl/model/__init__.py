"""The model: memory, classifiers, recognizer, metrics."""
