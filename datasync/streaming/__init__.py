"""Streaming into training: order, mixture, cache and the dataset classes over them.

`datasync` exports the classes; nothing is imported before it is used.
"""
