"""retape: train models that do not fit."""
