"""Settings of training and prediction, apart from what trains and predicts: flags are made of them without PyTorch."""
