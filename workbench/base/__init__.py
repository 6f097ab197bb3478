"""What every room stands on: errors, settings, metrics, seeds, the background event loop, HTTP. No tensors."""
