"""The drop-in for torch's scaler: a facade over the stages of `gradscale.torch.step`."""
