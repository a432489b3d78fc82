"""The exact loss and gradients of any PyTorch module on a gigapixel image, in the memory you name."""
