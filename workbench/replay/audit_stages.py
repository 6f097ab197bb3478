"""Independent formulas for rollouts, rewards, filters, log-probs and advantages: one generator of claims for each
stage.

As `audit_formulas`: plain Python floats from the definitions, nothing of `functional` and `stages`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from statistics import correlation, stdev, variance
from typing import Any

from workbench.replay.audit_formulas import (
    EXACT,
    FLOAT32,
    MODEL,
    AuditView,
    Claim,
    Claims,
    Left,
    Lists,
    Ragged,
    averaged,
    bounded,
    clamp,
    each,
    flat,
    gap,
    groups_of,
    kl,
    lasts,
    mean,
    measured_advantages,
    measured_lengths,
    measured_scores,
    on_last,
    placed,
    policy_lag,
    row_sums,
    sessions_of,
    shares,
    size,
    spread,
)  # fmt: skip

# --- rollout ------------------------------------------------------------------------------------------


def rollout(v: AuditView) -> Claims:
    """Recompute what a rollout writes: masks, positions and lengths, from prompts, responses, finish reasons and
    transcripts.
    """
    b, joined = v.after, "prompts" in v.before or v.rows is None
    prompts, whole = yield from _laid_out(b)
    yield from _own_tokens(v, whole)
    yield from _ends(v, whole)
    yield from _padding(v, prompts, whole)
    yield from _same_prompts(v, prompts, len(b["prompts"][0]))
    yield from _texts(v, prompts, b.lengths)
    for name in ("responses", "rollout_log_probs", "policy_version", "finish_reason"):
        yield Left(name, "sampled by the model; its padding, bounds and end are checked")
    if "token_versions" in b:
        yield from _streamed(v, whole)
    if "multi_modal_inputs" in b:
        yield Left("multi_modal_inputs", "needs the model's processor")
    if "turns" in b:
        yield from _episodes(v)
    if "nodes" in b:
        yield from trees(v, counted=not joined)
    if not joined:
        yield from _repeated(v)
        yield from measured_lengths(b)


def _streamed(v: AuditView, whole: list[list[int]]) -> Claims:
    """Check the weights' versions along the rows of a stream: each begins with the row's own version and never falls."""
    b = v.after
    yield Left(
        "token_versions", "no draw of a stream can be repeated: later phases are done again from the recorded rows"
    )
    begun = [[first * row[0], *versions[1:]] for first, versions, row in zip(b["policy_version"], b["token_versions"], whole, strict=True)]  # fmt: skip
    rising = [list(itertools.accumulate(row, max)) for row in begun]
    yield Claim("token_versions", each(lambda x, own: x if own else 0, rising, whole), "from policy_version on, never falling", partial=True)  # fmt: skip
    moved = [any(x != first for x, own in zip(row, mine, strict=True) if own) for row, first, mine in zip(b["token_versions"], b["policy_version"], whole, strict=True)]  # fmt: skip
    yield averaged("streaming/several_versions", [float(one) for one in moved], "rows with tokens of several versions")


def targets(v: AuditView) -> Claims:
    """Recompute masks, positions and lengths of supervised rows, whose prompts and responses come from the data."""
    b = v.after
    prompts, whole = yield from _laid_out(b)
    many = bool(v.setting("every_turn"))
    own = each(lambda x: None if x else 0, whole) if many else whole
    yield Claim("response_mask", own, "1 on the target's tokens, 0 behind", partial=many)
    yield from _padding(v, prompts, whole)
    if not many:
        yield from _texts(v, prompts, b.lengths)
    if "pair_margin" in b:
        yield Claim("pair_margin", [0.0] * len(b.mask), "no margin")
        yield Claim("uid", [uid for uid in v.before["uid"] for _ in range(2)], "two rows of each pair", partial=True)
    for name in ("prompts", "responses", *(["response_text"] if many else [])):
        yield Left(name, "needs the tokenizer's chat template; its padding is checked")
    yield from measured_lengths(b)


def pairs(v: AuditView) -> Claims:
    """Recompute masks, positions and lengths of preference pairs, where each row's only own token is its last."""
    b = v.after
    prompts, whole = yield from _laid_out(b)
    own = [[int(t == n - 1) for t in range(len(row))] for row, n in zip(whole, b.lengths, strict=True)]
    yield Claim("response_mask", own, "1 on the last token, behind the text")
    yield Claim("uid", [uid for uid in v.before["uid"] for _ in range(2)], "two rows of each pair", partial=True)
    yield from _padding(v, prompts, whole)
    for name in ("prompts", "responses", "response_text", "pair_margin"):
        yield Left(name, "needs the tokenizer's chat template, or the data's columns; its padding is checked")
    yield from measured_lengths(b)


def _laid_out(b: Lists) -> Generator[Claim | Left, None, tuple[list[int], list[list[int]]]]:
    """Recompute masks, ids and positions; returns the prompts' lengths, and [B, T] with 1 on every response token."""
    prompts, lengths = list(map(sum, b["prompt_mask"])), b.lengths
    wide, long = len(b["prompts"][0]), len(b["responses"][0])
    real = [[0] * (wide - n) + [1] * n + [1] * m + [0] * (long - m) for n, m in zip(prompts, lengths, strict=True)]
    yield Claim("prompt_mask", [row[:wide] for row in real], "0 on the left padding, 1 on the prompt")
    yield Claim("attention_mask", real, "1 on the prompt and on the response's tokens, 0 on padding")
    yield Claim("input_ids", [p + r for p, r in zip(b["prompts"], b["responses"], strict=True)], "prompts, responses")
    counts = [list(itertools.accumulate(row)) for row in real]
    yield Claim("position_ids", each(lambda x, n: n - 1 if x else None, real, counts), "attended tokens before")
    return prompts, [row[wide:] for row in real]


def _repeated(v: AuditView) -> Claims:
    """Check that each prompt stands G times in the batch, with the last row greedy where a greedy baseline is set."""
    number = v.setting("group_size") + bool(v.settings.get("greedy_baseline"))
    rows = v.after["session"] if "session" in v.after else range(len(v.before["uid"]) * number)
    yield Claim("uid", [v.before["uid"][row // number] for row in rows], "each prompt G times", partial=True)
    if "session" in v.after:
        yield Left("session", "the agent loop's cut of an episode into rows; their order is checked")
        order = list(itertools.accumulate(int(a != b) for a, b in itertools.pairwise([0, *rows])))
        yield Claim("session", order, "episodes in order, the rows of one beside each other", partial=True)
    if "policy" in v.after:
        yield Left("policy", "the agent loop's own word")
    if "greedy" in v.after:
        yield Claim("greedy", [row % number == number - 1 for row in rows], "the last of each prompt's rows")


def _same_prompts(v: AuditView, prompts: list[int], wide: int) -> Claims:
    b = v.after
    yield Left("prompts", "needs the tokenizer's chat template; its padding, groups and messages are checked")
    alone = {rows[0] for rows in sessions_of(b).values() if len(rows) == 1} if "session" in b else range(len(b["uid"]))
    first = {
        uid: b["prompts"][row][wide - prompts[row] :] for row, uid in reversed([*enumerate(b["uid"])]) if row in alone
    }
    same = [[*[None] * wide, *first[uid]][-wide:] if n in alone else [None] * wide for n, uid in enumerate(b["uid"])]
    yield Claim("prompts", same, "episodes of one row with one uid have one prompt", partial=True)


def _own_tokens(v: AuditView, whole: list[list[int]]) -> Claims:
    """Recompute the response mask: 1 on all response tokens, or in episodes on those of the model's turns."""
    b = v.after
    if "turns" not in b:
        yield Claim("response_mask", whole, "1 on the response's tokens, 0 behind")
        yield from bounded(b, "rollout_log_probs", whole)
        return
    complete = all(b["turns"])
    expected = each(lambda x: None if x else 0, whole)
    if complete:
        expected = [_of_turns(turns, row) for turns, row in zip(b["turns"], whole, strict=True)]
    yield Claim("response_mask", expected, "1 on the tokens of the model's turns", partial=not complete)
    yield from bounded(b, "rollout_log_probs", expected)


def _of_turns(turns: list[dict[str, Any]], row: list[int]) -> list[int | None]:
    mine = [range(one["first"], one["last"] + 1) for one in turns if one["role"] == "assistant"]
    return [int(any(t in span for span in mine)) for t in range(len(row))]


def _ends(v: AuditView, whole: list[list[int]]) -> Claims:
    """Check where responses end: finish reason `stop` at the first end token, `length` at `max_tokens`."""
    b, limit = v.after, v.sampling.get("max_tokens")
    more = v.sampling.get("ignore_eos") or v.sampling.get("stop_token_ids", "()") != "()"
    plain = v.sampling.get("stop") == "()" and not more
    if "turns" in b or not plain or not limit:
        return
    expected = []
    for ids, reason, row in zip(b["responses"], b["finish_reason"], whole, strict=True):
        stop = next((t + 1 for t, token in enumerate(ids) if token in v.ends), limit)
        end = {"stop": stop if v.ends else sum(row), "length": limit}.get(reason, sum(row))
        expected.append([int(t < end) for t in range(len(row))] + [1] * (end > len(row)))
    yield Claim("response_mask", expected, "stop: up to the first EOS; length: max_tokens", partial=True)


def _padding(v: AuditView, prompts: list[int], whole: list[list[int]]) -> Claims:
    """Check that everything before prompts and behind responses is padding: the padding id, or 0 where batches were
    joined.
    """
    b = v.after
    outside = [ids[: len(ids) - n] for ids, n in zip(b["prompts"], prompts, strict=True)]
    outside += [ids[sum(row) :] for ids, row in zip(b["responses"], whole, strict=True)]
    known = getattr(v.tokenizer, "pad_token_id", None)
    pad = known if known is not None else next((x for x, _ in Counter(flat(outside)).most_common(1)), 0)
    pads = {pad, 0, getattr(v.tokenizer, "eos_token_id", None) if known is None else pad}
    kept = zip(b["prompts"], prompts, strict=True)
    before = [[pad if t < len(ids) - n and x not in pads else None for t, x in enumerate(ids)] for ids, n in kept]
    yield Claim("prompts", before, "padding before the prompt", partial=True)
    rows = zip(b["responses"], whole, strict=True)
    behind = [[None if x or ids[t] in pads else pad for t, x in enumerate(row)] for ids, row in rows]
    yield Claim("responses", behind, "padding behind the response", partial=True)


def _texts(v: AuditView, prompts: list[int], lengths: list[int]) -> Claims:
    """Check that each response text is its tokens decoded, and that each prompt's tokens contain the row's last
    message.
    """
    b, decode = v.after, getattr(v.tokenizer, "decode", None)
    if decode is None:
        yield Left("response_text", "the tokenizer's folder is not here")
        return
    skip = v.sampling.get("skip_special_tokens", True)
    texts = [decode(ids[:n], skip_special_tokens=skip) for ids, n in zip(b["responses"], lengths, strict=True)]
    yield Claim("response_text", texts, "the response's tokens decoded")
    strange: list[Any] = []
    for ids, n, chat in zip(b["prompts"], prompts, b["raw_prompt"], strict=True):
        message = chat[-1].get("content") if isinstance(chat, list) and chat and "turns" not in b else None
        bare = "".join(message.split()) if isinstance(message, str) else ""
        whole = "".join(decode(v.tokenizer.encode(message)).split()) if bare else ""
        found = bare in whole and bare not in "".join(decode(ids[len(ids) - n :]).split())
        strange.append("its last message" if bare and found else None)
    yield Claim("prompts", strange, "tokens of the row's own prompt", partial=True)


def _episodes(v: AuditView) -> Claims:
    """Recompute the counts of turns, tool calls and errors of episodes, from their transcripts."""
    b = v.after
    yield Left("turns", "the agent's own transcript")
    yield Left("agent_extra", "whatever the agent loop gave")
    if all(b["turns"]):
        counted = [_counts(row) for row in b["turns"]]
        for name in counted[0]:
            yield Claim(name, [one[name] for one in counted], "from the transcript's turns and calls")
    else:
        for name in ("num_turns", "num_tool_calls", "turn_scores", "tool_rewards"):
            yield Left(name, "the agent loop left no transcript")
    statuses = [call["status"] for row in b["turns"] for turn in row for call in turn["calls"]]
    yield Claim("agent_loop/tool_errors", statuses.count("error") + statuses.count("late"), "calls that failed")
    errors = [bool((extra or {}).get("errors")) for extra in b["agent_extra"]]
    yield Claim("agent_loop/errors", sum(errors), "episodes with errors")
    yield from spread("agent_loop/num_turns", b["num_turns"], "turns")
    yield from spread("agent_loop/num_tool_calls", b["num_tool_calls"], "calls")


def _counts(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Count one episode's turns, tool calls, scores and rewards. A turn counts if the model read it, a call if it was
    answered.
    """
    calls = [call for turn in turns for call in turn["calls"] if call["status"] not in ("ignored", "not run")]
    assistant = [turn["role"] == "assistant" for turn in turns]
    heard = [turn["role"] != "assistant" and turn["last"] >= turn["first"] for turn in turns]
    return {
        "num_turns": sum(assistant) + sum(heard) + 1,
        "num_tool_calls": len(calls),
        "turn_scores": [turn["score"] for turn in turns if turn["score"] is not None],
        "tool_rewards": [call["reward"] for call in calls if call["reward"] is not None],
    }


# --- reward and what reshapes it ----------------------------------------------------------------------

_GSM8K = ("openai/gsm8k", "gsm8k", "workbench/arith")
UNSCORED = ("infra_error", "not_applicable")


def reward(v: AuditView) -> Claims:
    """Recompute rewards and their metrics, from the recorded `Score` objects."""
    b, mask, records = v.after, v.after.mask, v.after["score"]
    scored = [str(record.status.value) not in UNSCORED for record in records]
    once = [row == last for row, last in enumerate(_last_rows(v))]
    value = [float(record.value) if ok else 0.0 for record, ok in zip(records, scored, strict=True)]
    yield from _scores(v, _last_rows(v))
    yield Claim("scored", scored, "status is neither infra_error nor not_applicable")
    yield Claim("reward", value, "value of the Score; 0 where not scored", near=EXACT)
    yield Claim("token_level_scores", on_last(value, mask), "the reward on the last own token", near=EXACT)
    yield from _parts(v, once)
    for status, number in Counter(str(record.status.value) for record in itertools.compress(records, once)).items():
        yield Claim(f"reward/status/{status}", number, "rows of this status, or episodes")
    yield Claim("reward/empty_responses", sum(not any(own) for own in mask), "rows without an own token")
    yield from shares(
        "reward/scored_ratio", list(itertools.compress(scored, once)), "share of scored rows, or episodes"
    )
    yield from measured_scores(b)


def _parts(v: AuditView, once: list[bool]) -> Claims:
    """Recompute the columns of the scores' parts and extras. `once` marks the row of each episode that metrics count."""
    b, records = v.after, v.after["score"]
    for part in dict.fromkeys(part for score in records for part in score.parts):
        column = [float(score.parts.get(part, math.nan)) for score in records]
        yield Claim(f"reward/{part}", column, "the part of the Score; NaN without it", near=EXACT)
        values = [x for x in itertools.compress(b[f"reward/{part}"], once) if x == x]
        yield from spread(f"reward/{part}", values, f"part {part}")
    for key in dict.fromkeys(key for score in records for key in score.extra):
        recorded = b[f"reward_extra/{key}"]
        values = [score.extra.get(key, recorded[row]) for row, score in enumerate(records)]
        yield Claim(f"reward_extra/{key}", values, "the extra of the Score")


def _last_rows(v: AuditView) -> list[int]:
    """Return for each row the last row of its episode, whose response is scored; the row itself where every row is."""
    last = {row: rows[-1] for rows in sessions_of(v.after, _column(v)).values() for row in rows}
    return [last[row] for row in range(len(last))]


def _column(v: AuditView) -> str:
    """Return the name of the column that numbers sessions; "" where each row is a session."""
    return str(v.setting("sessions", "session") or "")


def _scores(v: AuditView, last: list[int]) -> Claims:
    """Recompute rewards by GSM8K's rule where `data_source` chose that scorer; every other score is the scorer's own
    record.
    """
    b, routed = v.after, v.settings.get("function") == "by data_source"  # a function named gsm8k may have other rules
    expected: list[float | None] = []
    for row, score in enumerate(b["score"]):
        truth = (b["reward_model"][row] or {}).get("ground_truth") if "reward_model" in b else None
        known = routed and "data_source" in b and b["data_source"][row] in _GSM8K
        if not (known and isinstance(truth, str) and str(score.status.value) in ("scored", "no_answer")):
            expected.append(None)
            continue
        answers = re.findall(r"#### (-?[0-9.,]+)", b["response_text"][last[row]][-300:])
        expected.append(float(bool(answers) and answers[-1].replace(",", "") == truth))
    again = "; GSM8K's strict rule is applied again" if any(value is not None for value in expected) else ""
    yield Left("score", f"the scorer's own record{again}")
    yield Claim("reward", expected, "1 where the number behind the last '#### ' is the truth, else 0", partial=True)


def overlong(v: AuditView) -> Claims:
    """Recompute DAPO's soft penalty for long responses, and the rewards with it."""
    b, start = v.before, v.setting("max_tokens") - v.setting("buffer")
    beyond = [clamp(n - start, 0, v.setting("buffer")) / v.setting("buffer") for n in b.lengths]
    taken = [-v.setting("penalty") * x if ok else 0.0 for x, ok in zip(beyond, b["scored"], strict=True)]
    yield Claim("reward/overlong", taken, "−penalty·(length − (max_tokens − buffer))/buffer, between −penalty and 0")
    total = [x + y for x, y in zip(b["reward"], taken, strict=True)]
    yield Claim("reward", total, "reward and penalty", 1.0)
    last = zip(b["token_level_scores"], on_last(taken, b.mask), strict=True)
    added = [[x + y for x, y in zip(row, more, strict=True)] for row, more in last]
    yield Claim("token_level_scores", added, "the penalty is added on the last own token", 1.0)
    yield averaged("reward/overlong/mean", taken, "mean penalty")
    yield averaged("reward/overlong/share", [float(x > 0) for x in beyond], "share of rows in the buffer or beyond")
    yield from measured_scores(v.after)


def turn_scores(v: AuditView) -> Claims:
    """Recompute the scores of turns and tool calls, placed on the last tokens of their turns."""
    b, mask = v.before, v.before.mask
    extra = [[0.0] * len(row) for row in mask]
    for row, turns in enumerate(b["turns"]):
        for turn in turns:
            last = turn["last"]
            if turn["role"] == "assistant" and turn["first"] <= last < len(mask[row]) and mask[row][last]:
                score = v.setting("turn_weight") * (turn["score"] or 0.0)
                extra[row][last] += score + v.setting("tool_weight") * sum(c["reward"] or 0.0 for c in turn["calls"])
    scored = b["scored"] if "scored" in b else [True] * len(mask)
    total = [
        [(v.setting("final_weight") * x + y) * ok for x, y in zip(row, more, strict=True)]
        for row, more, ok in zip(b["token_level_scores"], extra, scored, strict=True)
    ]
    yield Claim("token_level_scores", total, "final score, turns' and calls' scores, weighted", 1.0)
    yield from spread("turn_scores", [sum(row) for row in extra], "added scores", 1.0)
    yield from measured_scores(v.after)


def with_signal(b: Lists) -> list[int]:
    """Return the rows of groups whose scored rewards differ, or that have exactly one scored row (or episode)."""
    kept, once = [], lasts(b)
    for rows in groups_of(b["uid"]).values():
        values = [b["reward"][row] for row in rows if b["scored"][row] and once[row]]
        if len(values) == 1 or len(set(values)) > 1:
            kept += rows
    return sorted(kept)


def filter_groups(v: AuditView) -> Claims:
    """Recompute which groups dynamic sampling keeps, and how many it sampled, kept and dropped."""
    b, rows, number = v.before, with_signal(v.before), v.metrics.get("train/num_gen_batches", 1)
    wanted = len(set(b["uid"]))
    mine = len({b["uid"][row] for row in rows})
    if number == 1:
        kept = rows if mine else list(range(len(b["uid"])))
        yield Claim(
            "uid", [b["uid"][row] for row in kept], "groups whose rewards differ, all if there are none", partial=True
        )
        found = float(mine)
    else:
        found = v.metrics["filter_groups/kept"] + v.metrics["filter_groups/surplus"]
        flat_groups = [row for row in range(len(v.after["uid"])) if row not in with_signal(v.after)]
        uids: list[Any] = [None if row not in flat_groups else "" for row in range(len(v.after["uid"]))]
        yield Claim("uid", uids if found else [None] * len(uids), "no group of equal rewards", partial=True)
        first = [b["uid"][row] for row in rows] + [None] * len(v.after["uid"])
        yield Claim("uid", first[: len(v.after["uid"])], "the step's own groups come first", partial=True)
        number = number if found >= wanted else v.setting("max_num_gen_batches")
    yield Claim("train/num_gen_batches", number, "until the step is full, at most max_num_gen_batches")
    kept_now = len(set(v.after["uid"])) if found else 0
    yield Claim("filter_groups/kept", min(kept_now, wanted), "groups with signal, at most those wanted")
    yield Claim("filter_groups/dropped", wanted * number - found, "groups sampled that have no signal")
    yield Claim("filter_groups/surplus", max(found - wanted, 0), "groups with signal beyond those wanted")


def baseline(v: AuditView) -> Claims:
    """Recompute ReMax's baselines: the reward of each prompt's greedy row becomes a column of the other rows."""
    b = v.before
    greedy = {uid: row for row, uid in enumerate(b["uid"]) if b["greedy"][row]}
    rest = [row for row in range(len(b["uid"])) if not b["greedy"][row]]
    of = [greedy[b["uid"][row]] for row in rest]
    yield Claim("uid", [b["uid"][row] for row in rest], "rows that are not greedy", partial=True)
    yield Claim("reward_baselines", [b["reward"][row] for row in of], "reward of the prompt's greedy row")
    both = [bool(b["scored"][row] and b["scored"][base]) for row, base in zip(rest, of, strict=True)]
    yield Claim("scored", both, "scored, and so is the greedy row")
    scored = [b["reward"][row] for row in greedy.values() if b["scored"][row]]
    if scored:
        yield averaged("reward/greedy_baseline", scored, "mean reward of scored greedy rows")
    without = sum(not b["scored"][row] for row in greedy.values())
    yield Claim("reward/without_baseline", without, "prompts whose greedy row was not scored")


def resample(v: AuditView) -> Claims:
    """Check rows that are drawn at random: only their rewards and the share of distinct rows are checked."""
    rows = v.rows or []
    yield Claim("resample/distinct", len(set(rows)) / max(len(rows), 1), "share of different rows")
    drawn = [v.before["reward"][row] for row in rows]
    yield Claim("reward", drawn, "the drawn rows'", partial=True)


def best_and_worst(v: AuditView) -> Claims:
    """Recompute which pairs of samples have different rewards, and the mean margin of their rewards."""
    b, rewards, scored = v.after, v.after["reward"], v.after["scored"]
    gaps = [x - y for x, y in zip(rewards[::2], rewards[1::2], strict=True)]
    known = [gap > 0 and x and y for gap, x, y in zip(gaps, scored[::2], scored[1::2], strict=True)]
    kept = [[int(one and known[row // 2]) for one in own] for row, own in enumerate(b["response_mask"])]
    yield Claim("loss_mask", kept, "response_mask of pairs with two rewards")
    yield Claim("pair_margin", [0.0] * len(rewards), "no margin")
    yield averaged("pairs/tied", [float(not one) for one in known], "share of other pairs")
    margins = [gap for gap, one in zip(gaps, known, strict=True) if one]
    yield averaged("pairs/reward_margin", margins, "mean best − worst reward", 1 + size(rewards))


def keep_best(v: AuditView) -> Claims:
    """Recompute which of the kept samples are good enough to learn from."""
    b, least = v.after, v.setting("above")
    good = [s and (least is None or x >= least) for s, x in zip(b["scored"], b["reward"], strict=True)]
    kept = [[int(one and ok) for one in own] for own, ok in zip(b["response_mask"], good, strict=True)]
    yield Claim("loss_mask", kept, "response_mask of samples that are good enough")
    yield averaged("keep_best/kept", [float(one) for one in good], "share of them")


def kto_kl(v: AuditView) -> Claims:
    """Check that KTO's KL is the same number in all rows and at least 0, and check its metric."""
    found = v.after["kto_kl"]
    yield Claim("kto_kl", [max(found[0], 0.0)] * len(found), "one number, at least 0")
    yield Claim("kl", found[0], "the column's number")


# --- log-probs ------------------------------------------------------------------------------------------


def log_prob(v: AuditView) -> Claims:
    """Recompute the metrics of log-probs and entropies, and how far the trainer's log-probs are from the sampler's."""
    b, column = v.after, v.setting("column")
    yield Left(column, MODEL)
    yield from bounded(b, column)
    for name in ("teacher_top_ids", "teacher_top_log_probs") if v.setting("top_k") else ():
        yield Left(name, MODEL)
    for name in ("teacher_prompts", "teacher_prompt_mask", "teacher_prompt_text") if v.setting("hint") else ():
        yield Left(name, "needs the tokenizer's chat template")
    if v.setting("sum_pi_squared"):
        yield Left("sum_pi_squared", MODEL)
        least = each(lambda x, p, own: max(x, math.exp(2 * p)) if own else 0.0, b["sum_pi_squared"], b[column], b.mask)
        yield Claim("sum_pi_squared", least, "at least the token's own π²; 0 outside the mask", 1.0, partial=True)
    if v.setting("entropy"):
        entropies = b.own("entropys")
        yield Left("entropys", MODEL)
        yield Claim("entropys", placed([[max(x, 0.0) for x in row] for row in entropies], b.mask), "at least 0; 0 outside the mask", 1.0, partial=True)  # fmt: skip
        yield averaged("actor/entropy", flat(entropies), "mean over own tokens")
        if "rollout_log_probs" in b and any(map(any, b.mask)):
            yield from _sampler_diff(v, column)
    of_policy = v.setting("column") == "old_log_probs"  # a reference or a teacher has versions of its own
    if v.version is not None and of_policy and "policy_version" in b and b["policy_version"]:
        yield from policy_lag(v.version, b["policy_version"])


def _sampler_diff(v: AuditView, column: str) -> Claims:
    b = v.after
    logs = each(gap, b.own(column), b.own("rollout_log_probs"))
    largest = [max(map(abs, row), default=0.0) for row in logs]
    yield Claim("sampler_logprob_diff", largest, "largest |trainer − sampler| of the row's own tokens")
    p, q = flat(each(math.exp, b.own(column))), flat(each(math.exp, b.own("rollout_log_probs")))
    moved = list(map(abs, each(gap, [p], [q])[0]))
    yield Claim("training/rollout_probs_diff_valid", 1.0, "1: measured")
    yield averaged("training/rollout_probs_diff_mean", moved, "mean |π trainer − π sampler|")
    yield Claim("training/rollout_probs_diff_max", max(moved), "largest |π trainer − π sampler|")
    std = stdev(moved) if len(moved) > 1 else 0.0
    yield Claim("training/rollout_probs_diff_std", std, "deviation (n − 1)", max(moved))
    yield Claim("training/rollout_log_probs_diff_max", max(largest), "largest |trainer − sampler|, nats")
    far = each(lambda x: clamp(x, -20, 20), logs)
    yield averaged("training/rollout_kl", flat(each(lambda x: math.expm1(x) - x, far)), "mean r − 1 − log r")
    if min(len(set(p)), len(set(q))) > 1:
        yield Claim("training/rollout_actor_probs_pearson_corr", correlation(p, q), "Pearson's, of both π", 1.0)
    yield from _same_version(v, column, logs)


def _same_version(v: AuditView, column: str, logs: list[list[float]]) -> Claims:
    """Check that the sampler's log-probs are within 0.05 nats of the trainer's, on average, in rows that the same
    weights sampled at the same temperature.
    """
    b = v.after
    if v.sampling.get("top_p", 1.0) != 1.0 or (v.sampling.get("temperature") or 1.0) != v.setting("temperature"):
        return
    versions = b.get("policy_version") or [None] * len(logs)
    greedy = b.get("greedy") or [False] * len(logs)
    same = [x is not None and x == v.version and not g for x, g in zip(versions, greedy, strict=True)]
    if size([x for row, ok in zip(logs, same, strict=True) if ok for x in row]) > 0.05:
        theirs = [row if ok else [None] * len(row) for row, ok in zip(b["rollout_log_probs"], same, strict=True)]
        yield Claim(column, theirs, "the sampler's, of the same version: 0.05 apart in mean", near=0.05, partial=True)


def values(v: AuditView) -> Claims:
    """Recompute the metrics of the critic's values."""
    yield Left("values", MODEL)
    yield Claim(
        "values", [[None if own else 0.0 for own in row] for row in v.after.mask], "0 outside the mask", partial=True
    )
    yield from spread("critic/values", flat(v.after.own("values")), "values of own tokens")


def exact_kl(v: AuditView) -> Claims:
    """Recompute the metrics of the exact KL, and those of two estimators of it."""
    b, full = v.after, flat(v.after.own("full_kl"))
    yield Left("full_kl", MODEL)
    yield averaged("actor/full_kl", full, "mean over own tokens")
    yield Claim("actor/full_kl_max", max([*full, 0.0]), "largest of own tokens")
    if "old_log_probs" in b and "ref_log_prob" in b:
        deltas = [x - y for x, y in zip(flat(b.own("old_log_probs")), flat(b.own("ref_log_prob")), strict=True)]
        for kind in ("k1", "k3"):
            yield averaged(f"actor/full_kl_{kind}", [kl(x, kind) for x in deltas], f"mean {kind}", size(deltas))


def influence(v: AuditView) -> Claims:
    """Recompute mean, largest and smallest of the rows' influence, summed over their tokens."""
    yield Left("influence", MODEL)
    yield Left("influence/gradient_norm", "needs the model")
    rows = [math.fsum(row) for row in v.after["influence"]]
    yield from spread("influence", rows, "sums over a row's tokens", max((size(row) * len(row) for row in v.after["influence"]), default=0.0))  # fmt: skip


# --- advantages and trees -----------------------------------------------------------------------------

Key = tuple[Any, int]
"""A node by its `uid` and number."""


def _keys(b: Lists) -> list[list[Key | None]]:
    """Return [B, T]: the tree node of each response token as (uid, number); None outside the response."""
    return [[(uid, node) if node else None for node in row] for uid, row in zip(b["uid"], b["nodes"], strict=True)]


def _leaves(keys: Sequence[Sequence[Key | None]], counted: Sequence[bool]) -> dict[Key, list[int]]:
    """Map each tree node to the indices of the counted rows whose path from the root has it; `keys[row]` is that path,
    with None for tokens of no node."""
    leaves: dict[Key, list[int]] = {}
    for row, line in enumerate(keys):
        for key in dict.fromkeys(one for one in line if one is not None):
            leaves.setdefault(key, [])
            if counted[row]:
                leaves[key].append(row)
    return leaves


def _whole(keys: Sequence[Sequence[Key | None]]) -> list[list[int | None]]:
    """Return [B, T]: −1 at each token whose set of rows differs from that of its node's first token, None elsewhere.
    All None means that every node's tokens belong to the same rows.
    """
    having: dict[tuple[Key, int], set[int]] = {}
    for row, line in enumerate(keys):
        for place, key in enumerate(line):
            if key is not None:
                having.setdefault((key, place), set()).add(row)
    rows: dict[Key, set[int]] = {}
    for (key, _), there in sorted(having.items(), key=lambda one: one[0][1]):
        rows.setdefault(key, there)
    return [
        [None if key is None or having[key, place] == rows[key] else -1 for place, key in enumerate(line)]
        for line in keys
    ]


def trees(v: AuditView, *, counted: bool) -> Claims:
    """Check that rows that share a tree node have equal tokens and log-probs there; with `counted` also how many tokens
    were sampled, shared ones counted once.
    """
    b = v.after
    yield Left("nodes", "the rollout's own record; that shared tokens are equal, and the counts, are checked")
    keys, first = _keys(b), dict[tuple[Key, int], tuple[int, float]]()
    yield Claim("nodes", _whole(keys), "all tokens of a node are of the same rows", partial=True)
    seen: list[bool] = []
    branched, expected, log_probs = 0, [], []
    for row, line in enumerate(keys):
        tokens = [(one, place) for place, one in enumerate(line) if one is not None]
        branched += bool(tokens) and tokens[0] in first
        seen += [one in first for one in tokens if b.mask[row][one[1]]]
        for one in tokens:
            first.setdefault(one, (b["responses"][row][one[1]], b["rollout_log_probs"][row][one[1]]))
        there = [first[one, place] if one is not None else (None, None) for place, one in enumerate(line)]
        expected.append([token for token, _ in there])
        log_probs.append([value for _, value in there])
    yield Claim("responses", expected, "the tokens of the node's first row", partial=True)
    yield Claim("rollout_log_probs", log_probs, "the log-probs of the node's first row", partial=True)
    if not counted:
        return
    yield Claim("tree/branched", branched, "rows whose first token is another row's")
    yield Claim("tree/sampled_tokens", seen.count(False), "own tokens, shared ones counted once")
    yield from shares("tree/shared_ratio", seen, "own tokens that are an earlier row's")


def learnt_once(v: AuditView) -> Claims:
    """Recompute the `loss_mask` with which each node's tokens are learnt from once: in the first scored row that has
    the node.
    """
    b, scored = v.after, list(map(bool, v.after["scored"]))
    keys = _keys(b)
    bearer = {key: rows[0] for key, rows in _leaves(keys, scored).items() if rows}
    kept = [
        [int(bool(own) and bearer.get(key) == row) for own, key in zip(mask, line, strict=True)]  # type: ignore[arg-type]
        for row, (mask, line) in enumerate(zip(b.mask, keys, strict=True))
    ]
    yield Claim("loss_mask", kept, "own tokens in the first scored row of their node")
    yield Claim("tree/learnt_tokens", sum(map(sum, kept)), "how many these are")


def _relative(v: AuditView, scores: Sequence[float], mates: Sequence[int], row: int) -> float:
    """Compute GRPO's advantage of a row relative to the rows `mates`: (score − mean) / (deviation + eps); 0 for fewer
    than two rows.
    """
    of = [scores[one] for one in mates]
    return (scores[row] - mean(of)) / _deviation(v, of) if len(of) > 1 else 0.0


def _estimator(value: Callable[..., float]) -> Callable[..., Any]:
    """Make a tree estimator from `value(v, scores, rows below a node, rows below its parent, rows of the group,
    trees)`, which returns the advantage of one node.
    """

    def estimate(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Any:
        keys = _keys(v.after)
        worth = _worth(v, keys, scored, value)
        advantages = [
            [worth.get(key, 0.0) * ok for key, own in zip(line, inside, strict=True) if own]  # type: ignore[arg-type]
            for line, inside, ok in zip(keys, mask, scored, strict=True)
        ]
        top = max(map(abs, worth.values()), default=0.0)
        rough = max((math.fsum(map(abs, row)) for row in rewards), default=0.0)
        return advantages, advantages, 1e-6 * (rough + top), EXACT

    return estimate


def _worth(
    v: AuditView, keys: list[list[Key | None]], scored: list[bool], value: Callable[..., float]
) -> dict[Key, float]:
    """Map each node that has a scored leaf to its advantage, computed by `value`."""
    scores, below = row_sums(v.after, "token_level_rewards"), _leaves(keys, scored)
    groups = {uid: [row for row in rows if scored[row]] for uid, rows in groups_of(v.after["uid"]).items()}
    tree = {row: below[line[0]] for row, line in enumerate(keys) if line and line[0] is not None}
    worth: dict[Key, float] = {}
    for uid, line in zip(v.after["uid"], keys, strict=True):
        before = groups[uid]
        for key in dict.fromkeys(one for one in line if one is not None):
            if below[key] and key not in worth:
                worth[key] = value(v, scores, below[key], before, groups[uid], tree)
            before = below[key]
    return worth


def _turn(v: AuditView, s: Sequence[float], below: Any, before: Any, group: Any, tree: Any) -> float:
    spread = stdev([s[row] for row in group]) if len(group) > 1 else 0.0
    gained = mean([s[row] for row in below]) - mean([s[row] for row in before])
    return gained / (spread + v.setting("eps", 1e-6)) if v.setting("norm_by_std", True) else gained


def _tree_rl(v: AuditView, s: Sequence[float], below: Any, before: Any, group: Any, tree: Any) -> float:
    own, parent, root = (mean([s[row] for row in rows]) for rows in (below, before, group))
    return ((own - root) + (own - parent)) / math.sqrt(len(below))


def _arpo(v: AuditView, s: Sequence[float], below: Any, before: Any, group: Any, tree: Any) -> float:
    return mean([_relative(v, s, group, row) for row in below])


def _tree_grpo(v: AuditView, s: Sequence[float], below: Any, before: Any, group: Any, tree: Any) -> float:
    return mean([_relative(v, s, group, row) + _relative(v, s, tree[row], row) for row in below])


TREES: Mapping[str, Callable[..., Any]] = {
    "tree_turn": _estimator(_turn),
    "tree_rl": _estimator(_tree_rl),
    "arpo": _estimator(_arpo),
    "tree_grpo": _estimator(_tree_grpo),
}
"""Estimator of trees → its slow form, as in `ESTIMATORS`."""


# --- advantages -----------------------------------------------------------------------------------------


def advantage(v: AuditView) -> Claims:
    """Recompute token rewards with their KL penalty, advantages, returns, and the metrics of all three."""
    b, mask = v.after, [list(map(bool, row)) for row in v.after.get("loss_mask", v.after.mask)]
    yield from _penalised(v)
    yield from _estimated(v, each(int, mask))
    zero = [not any(row) for row in b.own("advantages", mask)]
    group_sizes = Counter(uid for uid, _ in sessions_of(b, _column(v)))
    yield Claim("advantage/singleton_groups", list(group_sizes.values()).count(1), "groups of one row, or episode")
    yield Claim("advantage/zero_rows", sum(zero), "rows whose advantages are all 0")
    yield from shares("advantage/zero_share", zero, "their share")
    yield from measured_scores(b)
    yield from measured_advantages(b)


def _estimated(v: AuditView, mask: list[list[int]]) -> Claims:
    name, rewards, rows = str(v.settings["estimator"]), v.after["token_level_rewards"], list(range(len(mask)))
    last = rows if name in OF_TOKENS else _last_rows(v)
    if (estimate := ESTIMATORS.get(name)) is None:
        yield Left("advantages", f"foreign estimator {name}")
        yield Left("returns", f"foreign estimator {name}")
        return
    scored = v.after["scored"] if "scored" in v.after else [True] * len(mask)
    counted = [bool(ok) and last[row] == row for row, ok in enumerate(scored)]
    several = last != rows
    whole = [row_mask if any(row_mask) or not several else [1, *row_mask[1:]] for row_mask in mask]
    *columns, noise, near = estimate(v, whole, rewards, counted)
    if several:  # a row's advantage is one number: that of its session's last row
        numbers = [columns[0][row][0] for row in last]
        columns = [[[x] * sum(row_mask) for x, row_mask in zip(numbers, mask, strict=True)]] * 2
    for column, ragged in zip(("advantages", "returns"), columns, strict=True):
        yield Claim(column, placed(ragged, mask), f"{name}, from the token rewards", noise, near)


def _penalised(v: AuditView) -> Claims:
    b, mask, scores = v.after, v.after.mask, v.before["token_level_scores"]
    if "kl_controller" not in v.settings:
        yield Claim("token_level_rewards", scores, "the token scores", near=0.0)
        return
    kind, controller = v.setting("kl_type"), str(v.settings["kl_controller"])
    deltas = each(gap, b.own("old_log_probs"), b.own("ref_log_prob"))
    penalties = each(lambda x: kl(x, kind), deltas)
    numbers = _numbers(v)
    beta = numbers.get("coef") if controller.startswith("FixedKL") else (v.state or {}).get("value")
    if beta is None and v.step == 1:
        beta = numbers.get("coef")
    if beta is None:
        beta = v.metrics["actor/reward_kl_penalty_coeff"]
        yield Left("actor/reward_kl_penalty_coeff", "the controller's state before the step was not kept")
    else:
        yield Claim("actor/reward_kl_penalty_coeff", beta, f"β of {controller}")
    rewards = each(lambda s, x: s - beta * x, scores, placed(penalties, mask))
    noise = [2 * abs(beta) * max(map(abs, row), default=0.0) for row in deltas]
    yield Claim("token_level_rewards", rewards, f"token scores − β·{kind}", noise, EXACT)
    rows, rough = ([mean(row) for row in penalties], mean([size(row) for row in deltas]))
    yield Claim("actor/reward_kl_penalty", mean(rows), "mean over rows of the row's mean KL", rough)


def controller(v: AuditView) -> Claims:
    """Recompute the adaptive KL coefficient after the step: β·(1 + clip(kl/target − 1, ±0.2)·rows/horizon)."""
    numbers = _numbers(v)
    error = clamp(v.metrics["actor/reward_kl_penalty"] / numbers["target"] - 1, -0.2, 0.2)
    beta = v.metrics["actor/reward_kl_penalty_coeff"]
    value = beta * (1 + error * len(v.after["uid"]) / numbers["horizon"])
    yield Claim("controller", value, "β·(1 + clip(kl/target − 1, ±0.2)·rows/horizon)", near=1e-9)


def _numbers(v: AuditView) -> dict[str, float]:
    """Parse the arguments of the KL controller from its repr, such as {"coef": 0.001, "target": 0.1}."""
    return {name: float(x) for name, x in re.findall(r"(\w+)=([-\d.e+]+)", str(v.settings["kl_controller"]))}


Estimate = tuple[Ragged, Ragged, Any, float]
"""Advantages and returns of own tokens, noise, relative tolerance."""


def _grouped(
    v: AuditView, mask: list[list[int]], scores: Sequence[float], counted: Sequence[bool], formula: Any
) -> list[float]:
    """Compute one number per row by `formula(v, scores, lengths)` over the counted rows of each group.

    A group of one row gets 0, or with `singleton="verl"` its score; rows that are not counted get 0.
    """
    values = [0.0] * len(mask)
    for rows in groups_of(v.after["uid"]).values():
        inside = [row for row in rows if counted[row]]
        of = [scores[row] for row in inside]
        found = formula(v, of, [sum(mask[row]) for row in inside]) if len(of) > 1 else of
        for row, value in zip(inside, found, strict=True):
            values[row] = value if len(of) > 1 or v.setting("singleton") == "verl" else 0.0
    return values


def _grpo(v: AuditView, s: list[float], _: Any) -> list[float]:
    return [(x - mean(s)) / _deviation(v, s) for x in s]


def _deviation(v: AuditView, s: list[float]) -> float:
    return stdev(s) + v.setting("eps", 1e-6) if v.setting("norm_by_std", True) else 1.0


def _passk(v: AuditView, s: list[float], _: Any) -> list[float]:
    first, second = sorted(s)[-1], sorted(s)[-2]
    return [(first - second) / _deviation(v, s) if x == first else 0.0 for x in s]


def _rloo(v: AuditView, s: list[float], _: Any) -> list[float]:
    return [x - (math.fsum(s) - x) / (len(s) - 1) for x in s]


def _opo(v: AuditView, s: list[float], lengths: list[int]) -> list[float]:
    weights = lengths if any(lengths) else [1] * len(s)
    return [x - math.fsum(w * y for w, y in zip(weights, s, strict=True)) / sum(weights) for x in s]


def _maxrl(v: AuditView, s: list[float], _: Any) -> list[float]:
    return [(x - mean(s)) / (mean(s) if mean(s) > 0 else 1) for x in s]


def _centred(v: AuditView, s: list[float], _: Any) -> list[float]:
    return [x - mean(s) for x in s]


def _rowwise(
    one: Callable[[AuditView, Any, Any], list[float]], *, whiten: bool = False, alpha: bool = False
) -> Callable[..., Estimate]:
    """Make an estimator that puts one number per row on all its tokens; `one(v, scores, lengths)` computes the numbers
    of a group.

    `whiten` normalises the result over tokens, `alpha` multiplies it by GPG's factor.
    """

    def estimate(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
        scores = row_sums(v.after, "token_level_rewards")
        factor = _alpha(v, scores, scored) if alpha else 1.0
        values = [factor * x for x in _grouped(v, mask, scores, scored, one)]
        noise = _rounding(v, scores, rewards, values, scored)
        ragged = [[value] * sum(own) for value, own in zip(values, mask, strict=True)]
        return _white(ragged, scored, max(noise)) if whiten else (ragged, ragged, noise, EXACT)

    return estimate


def _alpha(v: AuditView, scores: Sequence[float], scored: Sequence[bool]) -> float:
    """Compute GPG's factor: the number of scored rows divided by those whose score is not 0, divided by `f_norm`."""
    counted = [x for x, ok in zip(scores, scored, strict=True) if ok]
    nonzero = len(counted) - counted.count(0)
    return (len(counted) / nonzero if nonzero else 1.0) / v.setting("f_norm", 1.0)


def _rounding(
    v: AuditView, scores: Sequence[float], rewards: Ragged, values: Sequence[float], scored: Sequence[bool]
) -> Any:
    """Bound the rounding error of each row's advantage: rewards that are summed are rounded, and dividing by the
    deviation enlarges that.
    """
    rough = [math.fsum(map(abs, row)) * (len(row) - row.count(0) > 1) for row in rewards]
    noise = [0.0] * len(scores)
    for rows in groups_of(v.after["uid"]).values():
        counted = [scores[row] for row in rows if scored[row]]
        below = max(stdev(counted), 1e-6) if len(counted) > 1 else 1.0
        worst = max(rough[one] for one in rows) * max(1 / below, 1)
        noise = [worst * (1 + abs(values[row])) if row in rows else x for row, x in enumerate(noise)]
    return noise


def _white(ragged: Ragged, scored: Sequence[bool], noise: float = 0.0) -> Estimate:
    """Whiten values over the tokens of scored rows: (x − mean) / √(variance + 1e-8); other rows get 0. Fewer than two
    values stay as they are.
    """
    inside = [x for row, ok in zip(ragged, scored, strict=True) for x in row if ok]
    middle, var = (mean(inside), variance(inside)) if len(inside) > 1 else (0.0, 1 - 1e-8)
    whitened = [
        [(x - middle) / math.sqrt(var + 1e-8) * ok for x in row] for row, ok in zip(ragged, scored, strict=True)
    ]
    top = max(map(abs, inside), default=0.0) + noise
    more = top / math.sqrt(var + 1e-8) * (1 + top / math.sqrt(var + 1e-8))
    return whitened, whitened, more, FLOAT32


def _to_go(rewards: Ragged, gamma: float, scored: Sequence[bool]) -> Ragged:
    """Compute the discounted reward-to-go of each response token; 0 in rows that were not scored."""
    sums = []
    for row, ok in zip(rewards, scored, strict=True):
        carried, backwards = 0.0, []
        for x in reversed(row):
            carried = x + gamma * carried
            backwards.append(carried * ok)
        sums.append(backwards[::-1])
    return sums


def _total(rewards: Ragged) -> float:
    return max((math.fsum(map(abs, row)) for row in rewards), default=0.0)


def _plus_plus(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
    returns = _to_go(_inside(rewards, mask), v.setting("gamma", 1.0), scored)
    made, _, noise, near = _white(returns, scored, _total(rewards))
    return made, returns, noise, near


def _remax(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
    returns = _to_go(_inside(rewards, mask), 1.0, scored)
    rows = zip(returns, v.after["reward_baselines"], scored, strict=True)
    return [[(x - base) * ok for x in row] for row, base, ok in rows], returns, 2 * _total(rewards), EXACT


def _gae(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
    gamma, lam, advantages = v.setting("gamma", 1.0), v.setting("lam", 1.0), []
    guesses = v.after.own("values", mask)
    for row, guess in zip(_inside(rewards, mask), guesses, strict=True):
        after = next_value = 0.0
        backwards = []
        for r, value in zip(reversed(row), reversed(guess), strict=True):
            after = r + gamma * next_value - value + gamma * lam * after
            next_value = value
            backwards.append(after)
        advantages.append(backwards[::-1])
    advantages = [[a * ok for a in row] for row, ok in zip(advantages, scored, strict=True)]
    returns = [
        [a + value * ok for a, value in zip(*rows, strict=True)]
        for *rows, ok in zip(advantages, guesses, scored, strict=True)
    ]
    noise = _total(rewards) + 2 * _total(guesses)
    if not v.setting("whiten", True):
        return advantages, returns, noise, FLOAT32
    white, _, more, near = _white(advantages, scored, noise)
    return white, returns, more, near


def _inside(rows: Ragged, mask: list[list[int]]) -> Ragged:
    return [[x for x, own in zip(*pair, strict=True) if own] for pair in zip(rows, mask, strict=True)]


def _gdpo(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
    parts = [one.strip() for one in str(v.settings["parts"]).split(",")]
    totals = [0.0] * len(mask)
    for part, weight in zip(parts, v.setting("weights") or [1.0] * len(parts), strict=True):
        column = v.after[f"reward/{part}"]
        there = [ok and math.isfinite(x) for ok, x in zip(scored, column, strict=True)]
        found = _grouped(v, mask, column, there, _grpo)
        totals = [total + weight * x for total, x in zip(totals, found, strict=True)]
    return _white([[x] * sum(own) for x, own in zip(totals, mask, strict=True)], scored)


def _token_baseline(packed: bool) -> Callable[..., Estimate]:
    """Make the estimator with the optimal baseline of each position. With `packed` positions count only the model's own
    tokens.
    """

    def estimate(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
        returns, weights = _to_go(_inside(rewards, mask), 1.0, scored), _energies(v, mask, scored)
        places = [_places(own, packed) for own in mask]
        advantages: Ragged = [[] for _ in mask]
        for rows in groups_of(v.after["uid"]).values():
            lengths = sorted([sum(mask[row]) * scored[row] for row in rows] + [0, 0])
            longest, second = lengths[-1], lengths[-2]
            for row in rows:
                alone = second if sum(mask[row]) == longest > second else math.inf
                for place, n in places[row].items():
                    base = _base(rows, place, places, returns, weights, v.setting("eps", 1e-8))
                    advantages[row].append((returns[row][n] - (base if place < alone else 0.0)) * scored[row])
        return advantages, returns, 4 * _total(rewards), FLOAT32

    return estimate


def _energies(v: AuditView, mask: list[list[int]], scored: Sequence[bool]) -> Ragged:
    """Compute for each own token the cumulative sum of (1 − 2π + Σπ²)·ρ² up to it; 0 in rows that were not scored."""
    b = v.after
    ratios = (
        b.own("rollout_is_weights", mask)
        if "rollout_is_weights" in b
        else each(lambda _: 1.0, b.own("old_log_probs", mask))
    )
    steps = each(
        lambda x, s, r: (1 - 2 * math.exp(x) + s) * r * r,
        b.own("old_log_probs", mask),
        b.own("sum_pi_squared", mask),
        ratios,
    )
    return [[x * ok for x in itertools.accumulate(row)] for row, ok in zip(steps, scored, strict=True)]


def _places(own: Sequence[int], packed: bool) -> dict[int, int]:
    """Map the position of each own token to its number among the row's own tokens; with `packed` each number to itself."""
    found = [t for t, inside in enumerate(own) if inside]
    return {n if packed else t: n for n, t in enumerate(found)}


def _base(
    rows: Sequence[int], place: int, places: list[dict[int, int]], returns: Ragged, weights: Ragged, eps: float
) -> float:
    """Compute the baseline of a position, Σ G·W / (Σ W + eps), over those of the group's rows that have this position."""
    there = [
        (returns[row][places[row][place]], weights[row][places[row][place]]) for row in rows if place in places[row]
    ]
    return math.fsum(g * w for g, w in there) / (math.fsum(w for _, w in there) + eps)


OF_TOKENS = (
    "reinforce_plus_plus", "remax", "gae", "optimal_token_baseline", "tir_optimal_token_baseline"
)  # fmt: skip
ESTIMATORS: Mapping[str, Callable[[AuditView, list[list[int]], Ragged, list[bool]], Estimate]] = {
    "grpo": _rowwise(_grpo),
    "grpo_passk": _rowwise(_passk),
    "rloo": _rowwise(_rloo),
    "opo": _rowwise(_opo),
    "maxrl": _rowwise(_maxrl),
    "gpg": _rowwise(_centred, alpha=True),
    "reinforce_plus_plus_baseline": _rowwise(_centred, whiten=True),
    "reinforce_plus_plus": _plus_plus,
    "remax": _remax,
    "gae": _gae,
    "gdpo": _gdpo,
    "optimal_token_baseline": _token_baseline(packed=False),
    "tir_optimal_token_baseline": _token_baseline(packed=True),
    **TREES,
}
"""Estimator → its slow form: of the view, mask, token rewards and scored rows."""
