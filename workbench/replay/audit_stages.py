"""The second reading of rollouts, rewards, filters and log-probs, a generator of claims per stage.

As `audit_formulas`: plain Python floats from the definitions, nothing of `functional` and `stages`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Generator
from statistics import correlation, stdev
from typing import Any

from workbench.replay.audit_advantages import trees
from workbench.replay.audit_formulas import (
    EXACT,
    MODEL,
    AuditView,
    Claim,
    Claims,
    Left,
    Lists,
    averaged,
    bounded,
    clamp,
    each,
    flat,
    gap,
    groups_of,
    kl,
    lasts,
    measured_lengths,
    measured_scores,
    on_last,
    placed,
    policy_lag,
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
    once = [row == last for row, last in enumerate(_counting(v))]
    value = [float(record.value) if ok else 0.0 for record, ok in zip(records, scored, strict=True)]
    yield from _scores(v, _counting(v))
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


def _counting(v: AuditView) -> list[int]:
    """Return for each row the row whose response is scored: the last of its episode, or the row itself where every row
    is scored.
    """
    one = "session" if v.setting("sessions", "session") else ""
    last = {row: rows[-1] for rows in sessions_of(v.after, one).values() for row in rows}
    return [last[row] for row in range(len(last))]


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
    """Check what is certain about randomly drawn rows: their rewards, and the share of different ones."""
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
