"""What is made of tf.data's own model of a pipeline."""

import pytest
import tensorflow as tf

from stoker.scriptprofile.watcher.stoker_watch.pipeline import read_model


def numbers(first: tf.Tensor) -> tf.data.Dataset[tf.Tensor]:
    return tf.data.Dataset.range(first, first + 50)


@pytest.mark.parametrize("name", ["FlatMap", "Interleave"])
def test_what_happens_once_a_file_counts_once_a_file(name: str) -> None:
    files = tf.data.Dataset.from_tensor_slices(tf.range(8, dtype=tf.int64))
    dataset = (
        files.flat_map(numbers) if name == "FlatMap" else files.interleave(numbers, cycle_length=2)
    )
    iterator = iter(dataset.batch(10))
    for _ in range(13):
        next(iterator)

    nodes, _ = read_model(iterator)

    [files_read] = [each for each in nodes if each["name"] == "TensorSlice"]
    [all_read] = [each for each in nodes if each["name"].startswith(name)]
    assert files_read["per_output"] == pytest.approx(files_read["elements"] / all_read["elements"])
    assert files_read["per_output"] < 0.1
    # A file that was read to its end is not among them; sometimes no file is.
    inner = [each for each in nodes if each["name"] == "Range"]
    assert sum(each["per_output"] for each in inner) in (0, pytest.approx(1.0))
    assert {each["per_output"] for each in nodes if "Batch" in each["name"]} == {1.0}
