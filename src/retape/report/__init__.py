"""Records in, text and pictures out; never measures."""
