"""The Dice coefficient as a loss."""


def dice_loss(probability, mask, epsilon=1e-6):
    inter = 2 * (probability * mask).sum((-1, -2))
    sets = probability.sum((-1, -2)) + mask.sum((-1, -2))
    return 1 - ((inter + epsilon) / (sets + epsilon)).mean()
