"""Files as DeepSpeed's ZeRO-3 writes them, with the parameters' parts spread over several sub-groups."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.engines.reshard import optimizer_files, reshard

SIZES = (7, 12, 1, 30)
KINDS = ("weights", "exp_avg", "exp_avg_sq")


def whole() -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {kind: [torch.randn(size, generator=generator) for size in SIZES] for kind in KINDS}


def cut(values: list[torch.Tensor], rank: int, ranks: int, groups: tuple[int, ...]) -> list[torch.Tensor]:
    """Rank ``rank``'s parts; ``groups`` says how many parameters a sub-group holds."""
    parts = []
    for value in values:
        size = -(-len(value) // ranks)
        padded = torch.nn.functional.pad(value, (0, size * ranks - len(value)))
        parts.append(padded[rank * size : (rank + 1) * size])
    flat, first = [], 0
    for count in groups:
        flat.append(torch.cat(parts[first : first + count]))
        first += count
    return flat


def file_of(state: dict[str, list[torch.Tensor]], rank: int, ranks: int, groups: tuple[int, ...], step: int) -> dict:
    flat = {kind: cut(values, rank, ranks, groups) for kind, values in state.items()}
    moments = {
        n: {"step": torch.tensor(float(step)), "exp_avg": flat["exp_avg"][n], "exp_avg_sq": flat["exp_avg_sq"][n]}
        for n in range(len(groups))
    }
    inner = {"state": moments if step else {}, "param_groups": [{"lr": 0.1 * step, "params": list(range(len(groups)))}]}
    return {"optimizer_state_dict": {"fp32_flat_groups": flat["weights"], "optimizer_state_dict": inner}}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 5), (4, 4)])
@pytest.mark.parametrize(("old_groups", "new_groups"), [((4,), (4,)), ((1, 3), (2, 1, 1)), ((2, 2), (4,))])
def test_every_number_is_where_the_new_ranks_keep_it(before, after, old_groups, new_groups):
    state, empty = whole(), {kind: [torch.zeros(size) for size in SIZES] for kind in KINDS}
    old = [file_of(state, rank, before, old_groups, step=3) for rank in range(before)]
    for rank in range(after):
        template = file_of(empty, rank, after, new_groups, step=0)
        reshard(old, template, SIZES, rank, after)
        expected = file_of(state, rank, after, new_groups, step=3)["optimizer_state_dict"]
        found = template["optimizer_state_dict"]
        torch.testing.assert_close(found["fp32_flat_groups"], expected["fp32_flat_groups"], rtol=0, atol=0)
        inner, wanted = found["optimizer_state_dict"], expected["optimizer_state_dict"]
        torch.testing.assert_close(inner["state"], wanted["state"], rtol=0, atol=0)
        assert inner["param_groups"][0]["lr"] == wanted["param_groups"][0]["lr"]
        assert inner["param_groups"][0]["params"] == list(range(len(new_groups)))


def test_a_checkpoint_before_the_first_step_has_no_moments():
    state = whole()
    template = file_of(state, 0, 1, (4,), step=0)
    reshard([file_of(state, rank, 2, (4,), step=0) for rank in range(2)], template, SIZES, 0, 1)
    assert template["optimizer_state_dict"]["optimizer_state_dict"]["state"] == {}


@pytest.mark.parametrize("sizes", [(7, 12, 1, 300), (700,)])
def test_files_of_another_model_are_refused(sizes):
    state = whole()
    template = file_of(state, 0, 1, (4,), step=0)
    with pytest.raises(ValueError, match="another model"):
        reshard([file_of(state, rank, 2, (4,), step=3) for rank in range(2)], template, sizes, 0, 1)


def test_optimizer_files_come_in_rank_order(tmp_path):
    folder = tmp_path / "v1"
    folder.mkdir()
    for rank in (10, 2, *range(2), *range(3, 10)):
        (folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    names = [path.name for path in optimizer_files(tmp_path)]
    assert names == [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(11)]
