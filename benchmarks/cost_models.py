"""Models for `benchmarks.costs` that nobody here wrote: Keras applications, and networks made of
Keras layers as its own examples make them. Small inputs, so that a step takes part of a second.

The shares of the peak that a CPU core reaches were fitted to `MODELS` and the `gan`. Those in
`HELD_OUT` are there to see how wrong that is elsewhere: fit nothing to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _application(name: str, pixels: int) -> Callable[[Any], Any]:
    def make(keras: Any) -> Any:
        network = getattr(keras.applications, name)
        return network(weights=None, input_shape=(pixels, pixels, 3), classes=100)

    return make


def _transformer(keras: Any) -> Any:
    layers = keras.layers
    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(8000, 128)(tokens)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 32, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(x + attended)
        hidden = layers.Dense(512, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(128)(hidden))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(20, activation="softmax")(x))


def _recurrent(layer: str) -> Callable[[Any], Any]:
    def make(keras: Any) -> Any:
        series = keras.Input((50, 64))
        x = getattr(keras.layers, layer)(128)(series)
        return keras.Model(series, keras.layers.Dense(10, activation="softmax")(x))

    return make


def _towers(keras: Any) -> Any:
    """As DLRM: 26 tables, and two towers whose product is the prediction."""
    layers = keras.layers
    inputs = [keras.Input((1,), dtype="int32") for _ in range(26)]
    vectors = [layers.Flatten()(layers.Embedding(10_000, 16)(given)) for given in inputs]
    towers = []
    for half in (vectors[:13], vectors[13:]):
        x = layers.Concatenate()(half)
        for units in (256, 64):
            x = layers.Dense(units, activation="relu")(x)
        towers.append(x)
    return keras.Model(inputs, layers.Dot(1)(towers))


def _u_net(keras: Any) -> Any:
    layers = keras.layers
    image = keras.Input((64, 64, 3))
    x, kept = image, []
    for filters in (16, 32, 64):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.BatchNormalization()(x)
        kept.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(128, 3, padding="same", activation="relu")(x)
    for filters, skip in zip((64, 32, 16), kept[::-1], strict=True):
        x = layers.Conv2DTranspose(filters, 3, strides=2, padding="same")(x)
        x = layers.Concatenate()([x, skip])
        x = layers.SeparableConv2D(filters, 3, padding="same", activation="relu")(x)
    return keras.Model(image, layers.Conv2D(3, 1, activation="softmax")(x))


def _autoencoder(keras: Any) -> Any:
    layers = keras.layers
    x = given = keras.Input((784,))
    for units in (512, 128, 32, 128, 512):
        x = layers.Dense(units, activation="relu")(x)
        x = layers.GaussianNoise(0.1)(x) if units == 32 else x
    return keras.Model(given, layers.Dense(784, activation="sigmoid")(x))


def _text_convolution(keras: Any) -> Any:
    layers = keras.layers
    tokens = keras.Input((128,), dtype="int32")
    x = layers.Embedding(20_000, 128)(tokens)
    x = layers.Dropout(0.5)(x)
    for _ in range(2):
        x = layers.Conv1D(128, 7, padding="same", strides=3, activation="relu")(x)
    x = layers.GlobalMaxPooling1D()(x)
    x = layers.Dense(128, activation="relu")(x)
    return keras.Model(tokens, layers.Dense(20, activation="softmax")(x))


def _seq2seq(keras: Any) -> Any:
    """Two recurrent networks, the second of which attends to the first."""
    layers = keras.layers
    source, target = (keras.Input((20,), dtype="int32") for _ in range(2))
    read = layers.Bidirectional(layers.GRU(128, return_sequences=True))(
        layers.Embedding(5000, 128)(source)
    )
    written = layers.LSTM(256, return_sequences=True)(layers.Embedding(5000, 128)(target))
    attended = layers.Attention()([written, read])
    x = layers.LayerNormalization()(layers.Concatenate()([written, attended]))
    return keras.Model([source, target], layers.Dense(5000, activation="softmax")(x))


MODELS: dict[str, tuple[Callable[[Any], Any], str, int]] = {
    "resnet50": (_application("ResNet50", 64), "sgd", 8),
    "efficientnetb0": (_application("EfficientNetB0", 64), "adam", 8),
    "densenet121": (_application("DenseNet121", 64), "sgd", 8),
    "mobilenetv3": (_application("MobileNetV3Small", 64), "rmsprop", 8),
    "transformer": (_transformer, "adam", 16),
    "lstm": (_recurrent("LSTM"), "adam", 32),
    "gru": (_recurrent("GRU"), "adam", 32),
    "towers": (_towers, "adam", 256),
    "u_net": (_u_net, "adam", 8),
    "autoencoder": (_autoencoder, "adam", 64),
}
"""Name -> how to make it, its optimizer, its batch. The eleventh is `gan`."""

HELD_OUT: dict[str, tuple[Callable[[Any], Any], str, int]] = {
    "xception": (_application("Xception", 71), "sgd", 4),
    "convnext": (_application("ConvNeXtTiny", 64), "adam", 4),
    "text_conv": (_text_convolution, "adam", 64),
    "seq2seq": (_seq2seq, "adam", 16),
}
"""Likewise; nothing was fitted to these."""

GAN_BATCH = 16


def keras_model(name: str) -> tuple[Any, int]:
    """Compiled, and the batch."""
    import keras

    make, optimizer, batch = (MODELS | HELD_OUT)[name]
    model = make(keras)
    model.compile(optimizer, "mse" if name in ("autoencoder", "towers") else _LOSS)
    return model, batch


_LOSS = "categorical_crossentropy"


def gan_step() -> Any:
    """One step of both networks of Keras's DCGAN, as a function, and what owns its variables."""
    import keras
    import tensorflow as tf

    layers = keras.layers
    discriminator = keras.Sequential([keras.Input((32, 32, 3))])
    for filters in (32, 64, 64):
        discriminator.add(layers.Conv2D(filters, 4, strides=2, padding="same"))
        discriminator.add(layers.LeakyReLU(0.2))
    for layer in (layers.Flatten(), layers.Dropout(0.2), layers.Dense(1, activation="sigmoid")):
        discriminator.add(layer)
    generator = keras.Sequential([keras.Input((64,)), layers.Dense(4 * 4 * 64)])
    generator.add(layers.Reshape((4, 4, 64)))
    for filters in (64, 128, 128):
        generator.add(layers.Conv2DTranspose(filters, 4, strides=2, padding="same"))
        generator.add(layers.LeakyReLU(0.2))
    generator.add(layers.Conv2D(3, 5, padding="same", activation="sigmoid"))
    loss = keras.losses.BinaryCrossentropy()
    networks = (discriminator, generator)
    optimizers = [keras.optimizers.Adam(1e-4) for _ in networks]
    for optimizer, network in zip(optimizers, networks, strict=True):
        optimizer.build(network.trainable_variables)

    def step(real: Any) -> Any:
        ones, zeros = tf.ones((GAN_BATCH, 1)), tf.zeros((GAN_BATCH, 1))
        made = generator(tf.random.normal((GAN_BATCH, 64)))
        total = 0.0
        for network, optimizer, images, labels in (
            (discriminator, optimizers[0], tf.concat([made, real], 0), tf.concat([ones, zeros], 0)),
            (generator, optimizers[1], None, zeros),
        ):
            with tf.GradientTape() as tape:
                if images is None:
                    images = generator(tf.random.normal((GAN_BATCH, 64)))
                value = loss(labels, discriminator(images, training=True))
            variables = network.trainable_variables
            optimizer.apply(tape.gradient(value, variables), variables)
            total += value
        return total

    spec = tf.TensorSpec((GAN_BATCH, 32, 32, 3))
    function = tf.function(step, autograph=False).get_concrete_function(spec)
    return function, networks, optimizers  # a function does not keep its variables
