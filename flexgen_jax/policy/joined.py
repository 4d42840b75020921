"""The decoder layers in which one program decodes a token, where nothing is loaded between them."""

from __future__ import annotations

from flexgen_jax.policy.plan import BlockPlan


def joined_layers(plan: BlockPlan) -> dict[int, range]:
    """Returns the decoder layers in which one program decodes a token, by the first of them.

    That is so where all they need is on the device, and no tokens are guessed. Layers with experts,
    and those that do not attend, have programs of their own. Example: of 12 layers, at most 8 of
    which are joined, {1: range(1, 9), 9: range(9, 13)}.
    """
    policy = plan.policy
    if plan.unified or not plan.is_resident or plan.unpacks:
        return {}
    if policy.is_sparse or policy.draft_tokens:
        return {}
    runs: list[list[int]] = [[]]
    for number, layer in enumerate(plan.spec.layers):
        can_join = layer.attends and layer.experts is None
        if not can_join or len(runs[-1]) == plan.setting.sizes.joined_layers:
            runs.append([])
        if can_join:
            runs[-1].append(number)
    return {run[0]: range(run[0], run[-1] + 1) for run in runs if len(run) > 1}
