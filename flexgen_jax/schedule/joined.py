"""Groups of decoder layers that one program decodes, if nothing is loaded between them."""

from __future__ import annotations

from flexgen_jax.policy.plan import BlockPlan


def joined_layers(plan: BlockPlan) -> dict[int, range]:
    """Returns the groups of decoder layers that one program decodes, by their first layer.

    That is so where all they need is on the device, and no tokens are guessed. Layers with experts,
    and those that do not attend, have programs of their own. Example: with 12 layers and groups of
    at most 8, {1: range(1, 9), 9: range(9, 13)}.
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
