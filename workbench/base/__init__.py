"""What all other packages use: errors, settings, metrics, seeds, the background event loop, HTTP. No tensors."""
