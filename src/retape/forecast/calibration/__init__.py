"""Measures a device: `run.calibrate` returns its rates, `meter` times one op, `ops` are the ops that move memory."""
