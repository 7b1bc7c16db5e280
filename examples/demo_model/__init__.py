"""The parts of `train_demo_model.py`."""
