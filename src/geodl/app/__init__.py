"""The rooms behind ``IncrementalClassifier``: taking images in, choosing defaults, a learn step, advice, export."""
