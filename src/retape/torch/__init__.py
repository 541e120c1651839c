"""Regions over PyTorch: the engine, what a re-run must see again, and the drop-in for torch.utils.checkpoint."""
