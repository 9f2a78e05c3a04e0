"""The small tables that come with scikit-learn: no file, no download."""

from __future__ import annotations

import numpy as np

from lpom.datasets.base import Dataset

TEST_FRACTION = 0.2
SPLIT_SEED = 0


def load_bundled(name: str) -> Dataset:
    """One of digits, iris, wine, breast-cancer, diabetes, split 80/20 in a fixed way."""
    import sklearn.datasets
    from sklearn.model_selection import train_test_split

    table = getattr(sklearn.datasets, f"load_{name.replace('-', '_')}")()

    classes = tuple(str(label) for label in getattr(table, "target_names", ()))
    y = table.target.astype(np.int64 if classes else np.float32)
    x_train, x_test, y_train, y_test = train_test_split(
        table.data.astype(np.float32),
        y,
        test_size=TEST_FRACTION,
        random_state=SPLIT_SEED,
        stratify=y if classes else None,
    )
    kind = "stratified" if classes else "random"
    is_image = hasattr(table, "images")
    return Dataset(
        name=name,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        classes=classes,
        feature_names=tuple(str(feature) for feature in table.feature_names),
        image_shape=table.images.shape[1:] if is_image else None,
        notes=(
            f"The copy in scikit-learn, features as they are there; {kind} split of 80 % for "
            f"training and 20 % for testing, made by this library with seed {SPLIT_SEED}."
        ),
        picture_scale=1 / 16 if is_image else 1.0,  # grey levels of digits are 0 to 16
    )
