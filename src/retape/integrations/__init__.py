"""Adapters to other libraries, at most 150 lines each; whatever decides something lives a layer down."""
