"""Models of a user's own images: `IncrementalClassifier` and its learn steps, edits, advice, page and export."""
