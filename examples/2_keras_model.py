"""Place a Keras model's training step, and put the placement into a function of it.

python examples/2_keras_model.py
"""

import tensorflow as tf

import placewright

model = tf.keras.Sequential(
    [
        tf.keras.Input((32, 32, 3)),
        tf.keras.layers.Conv2D(32, 3, activation="relu", name="conv_1"),
        tf.keras.layers.Conv2D(64, 3, activation="relu", name="conv_2"),
        tf.keras.layers.GlobalAveragePooling2D(),
        tf.keras.layers.Dense(10, name="head"),
    ]
)
model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))

# The whole training step, as a graph: forward, backward and Adam.
training = placewright.load(model, batch=64)
print(f"{training.num_ops} ops in a training step")
result = placewright.place(training, "k80x2", trials=200)
print(f"{1e3 * result.step_seconds:.2f} ms a step, {result.speed_up:.2f} times one device")

# What is run here is the forward pass, on the one device that every machine has.
forward = tf.function(model).get_concrete_function(tf.TensorSpec([64, 32, 32, 3]))
placed = placewright.place(forward, "k80x2", method="expert", trials=1)
names = dict.fromkeys(placed.problem.cluster.device_names, "/device:CPU:0")
answers = placed.apply(forward, names)(tf.zeros([64, 32, 32, 3]))
print("answers of shape", tf.nest.flatten(answers)[0].shape)
