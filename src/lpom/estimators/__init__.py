"""scikit-learn estimators: `MLPClassifier` and `MLPRegressor`, trained by any method of `lpom`."""

from lpom.estimators.classifier import MLPClassifier
from lpom.estimators.regressor import MLPRegressor

__all__ = ["MLPClassifier", "MLPRegressor"]
