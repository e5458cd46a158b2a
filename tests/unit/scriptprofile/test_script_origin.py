"""From a call back to the line that a person would change: in each script it ends in `# here`."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.scriptprofile.observations import Place
from stoker.scriptprofile.rules.origin import argument_line, array_line, dtype_line, step_line

BATCHES = {
    "a constant of the module": """
BATCH = 4  # here
dataset = dataset.batch(BATCH)  # call
""",
    "assigned below the function that reads it": """
def make(dataset):
    return dataset.batch(BATCH)  # call
BATCH = 4  # here
""",
    "a name for a name": """
SMALL, LARGE = 4, 512  # here
size = SMALL
dataset = dataset.shuffle(100).batch(size)  # call
""",
    "a call of several lines": """
dataset = (
    tf.data.Dataset.range(10)
    .shuffle(100)
    .batch(  # call
        4,  # here
    )
)
""",
    "the default of a parameter": """
def make(
    dataset,
    batch_size=4,  # here
):
    return dataset.batch(batch_size)  # call
make(dataset)
""",
    "a parameter by the only call": """
def make(dataset, batch_size=32):
    return dataset.batch(batch_size)  # call
make(dataset, 4)  # here
""",
    "an option": """
parser.add_argument("--lr", default=0.1)
parser.add_argument("--batch-size", type=int, default=4)  # here
args = parser.parse_args()
dataset = dataset.batch(args.batch_size)  # call
""",
    "an option that was given on the command line": """
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()
dataset = dataset.batch(args.batch_size)  # call here
""",
    "a field of a dataclass": """
@dataclass
class Config:
    lr: float = 0.1
    batch_size: int = 4  # here
config = Config(lr=1.0)
dataset = dataset.batch(config.batch_size)  # call
""",
    "what the instance was made with": """
class Config:
    batch_size = 32
config = Config(batch_size=4)  # here
dataset = dataset.batch(config.batch_size)  # call
""",
    "a field of a class": """
class Config:
    batch_size = 4  # here
dataset = dataset.batch(Config.batch_size)  # call
""",
    "a key of a dict": """
config = {
    "batch_size": 4,  # here
}
dataset = dataset.batch(config["batch_size"])  # call
""",
    "the assignment of what it was": """
BATCH = 4  # here
if on_the_cluster:
    BATCH = 512
dataset = dataset.batch(BATCH)  # call
""",
    "what is computed stays": """
BATCH = 4
for size in sizes:
    dataset = dataset.batch(size)  # call here
""",
}


def place(folder: Path, text: str, mark: str = "call") -> Place:
    """The line of a script that has this mark."""
    script = folder / "train.py"
    if not script.exists():
        script.write_text(text)
    [line] = (
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if mark in line.partition("#")[2].split()
    )
    return Place(file=str(script), line=line)


@pytest.mark.parametrize("text", BATCHES.values(), ids=BATCHES)
def test_a_batch_size_is_followed_to_where_it_was_written(tmp_path: Path, text: str) -> None:
    called = place(tmp_path, text)

    found = argument_line(called, "batch", "batch_size", position=0, value=4)

    assert found == place(tmp_path, text, "here")


def test_an_argument_that_is_not_given_or_no_file_is_nothing(tmp_path: Path) -> None:
    called = place(tmp_path, "model.fit(x, y)  # call\n")

    assert argument_line(called, "fit", "batch_size", position=2) is None
    assert argument_line(Place(file="", line=0), "fit", "batch_size") is None
    assert argument_line(Place(file="<stdin>", line=1), "fit", "batch_size") is None
    (tmp_path / "broken.py").write_text("def (")
    assert argument_line(Place(file=str(tmp_path / "broken.py"), line=1), "fit", "x") is None


ARRAYS = {
    "a division": """
x = load_images()
y = load_labels()
x = x / 255.0  # here
x = x.reshape(-1, 28)[:1000]
dataset = tf.data.Dataset.from_tensor_slices((y, x))  # call
""",
    "in place": """
x = load_images().astype("float32")
x /= norm  # here
dataset = tf.data.Dataset.from_tensor_slices(({"b": x, "a": y}, labels))  # call
""",
    "in a function": """
def load():
    labels = np.zeros(4)
    return labels
def make(labels, features):
    return tf.data.Dataset.from_tensor_slices((labels, features))  # call
features = np.random.rand(10, 4)  # here
make(np.zeros(4), features)
""",
    "a tuple by its name": """
features = np.random.rand(10, 4)  # here
data = (labels, features)
dataset = tf.data.Dataset.from_tensor_slices(data)  # call
""",
    "in the call": """
dataset = tf.data.Dataset.from_tensor_slices((labels, x / 255.0))  # call here
""",
}


@pytest.mark.parametrize("text", ARRAYS.values(), ids=ARRAYS)
def test_an_array_is_followed_to_where_it_was_computed(tmp_path: Path, text: str) -> None:
    called = place(tmp_path, text)

    assert array_line(called, "from_tensor_slices", 1) == place(tmp_path, text, "here")


@pytest.mark.parametrize(
    "text",
    [
        'keras.config.set_floatx("float64")  # here\nmodel = keras.Sequential([])  # call\n',
        'DTYPE = "float64"  # here\nmodel = Dense(4, dtype=DTYPE)  # call\n',
        "a = Dense(4, dtype='float32')\nb = Dense(4, dtype=tf.float64)  # here call\n",
    ],
)
def test_the_dtype_of_a_model_is_followed_to_the_line_that_set_it(
    tmp_path: Path, text: str
) -> None:
    assert dtype_line(place(tmp_path, text), "float64") == place(tmp_path, text, "here")
    assert dtype_line(place(tmp_path, text), "float16") is None


STEP = """
def gradients(x):
    with tf.GradientTape() as tape:
        loss = model(x)
    return tape.gradient(loss, model.variables)  # tape
def train_step(x):  # here
    optimizer.apply(gradients(x))  # step
def main():
    for x in dataset:
        train_step(x)  # loop
main()  # module
"""


def test_a_step_is_the_outermost_function_below_the_loop(tmp_path: Path) -> None:
    first = {"tape": 2, "step": 6, "loop": 8, "module": 1}
    calls = [(place(tmp_path, STEP, mark), line) for mark, line in first.items()]

    assert step_line(calls) == place(tmp_path, STEP, "here")
    assert step_line(calls[2:]) is None, "the loop is in the same function"
    assert step_line(calls[3:]) is None
    assert step_line([]) is None
