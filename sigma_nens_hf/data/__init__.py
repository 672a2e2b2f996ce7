"""Labelled texts and images as the splits of a training: loaded, checked, carved and encoded."""
