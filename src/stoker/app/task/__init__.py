"""The in-job side of a training on several processes: worker, barrier, and the stage that starts them."""
