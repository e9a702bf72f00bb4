"""What an attack found, on the terminal."""

from math import nan
from pathlib import Path
from typing import Any

from pflsec.cli.console import number, out, print_table


def print_scores(run: Path, scores: Any) -> None:
    """Print the run's headline, and the tables of the attacks just made."""
    _print_headline(run, scores)
    _print_summary(scores)
    _print_words(scores)
    _print_membership(scores)


def records(scores: Any) -> list[dict[str, Any]]:
    """Return the rows of an attack's scores, with None for what is not available."""
    from pandas import isna

    table = scores.table
    return [{k: None if isna(v) else v for k, v in row.items()} for row in table.to_dict("records")]


def _print_headline(run: Path, scores: Any) -> None:
    """Print the run's worst case over all its attacks, and what the controls of the attacks just made say."""
    from pflsec.reports import controls
    from pflsec.reports.groups import by_seed
    from pflsec.reports.load import load_run
    from pflsec.reports.tables import headline_table, records
    from pflsec.reports.words import headline_sentence

    data = load_run(run)
    (row,) = records(headline_table(by_seed([data])))
    out.print(headline_sentence(row), markup=False)
    made = {one.path.name for one in scores}
    for attack in data.attacks:
        if attack.id in made:
            out.print(f"{attack.name}: {controls.sentence(attack.meta)}", markup=False)


def _print_words(scores: Any) -> None:
    """Print how many words were found, where the data are texts."""
    rows = []
    for one in scores:
        if not (table := one.tokens.dropna(subset=["token_recall"])).empty:
            names = (
                "token_recall",
                "recall_blind",
                "token_precision",
                "rouge_l",
                "multiset_exact",
                "sequence_exact",
                "identified",
            )
            rows.append([
                one.table["attack"].iloc[0], str(len(table)), *(number(float(table[name].mean())) for name in names)
            ])  # fmt: skip
    if rows:
        columns = ["attack", "texts", "recall", "blind", "precision", "ROUGE-L", "all words", "in order", "identified"]
        print_table("Words found (means over texts)", columns, rows)


def _print_summary(scores: Any) -> None:
    rows = []
    for one in scores:
        table = one.table
        invalid = table["attack_valid"].eq(False).fillna(False)
        table.loc[invalid, ["psnr_capped", "ssim", "excess_psnr", "identified"]] = nan  # they stand in no number
        ended = table["status"].where(~invalid, table["status"] + ", not valid")
        for (attack_name, status), group in table.groupby(["attack", ended]):
            median = {c: group[c].median() for c in ("psnr_capped", "ssim", "excess_psnr")}
            rows.append([
                attack_name, status, f"{len(group)} of {len(table)}", number(float(median["psnr_capped"])),
                number(float(group["psnr_capped"].max())), number(float(median["ssim"])),
                number(float(median["excess_psnr"])), number(float(group["identified"].mean())),
                "; ".join(sorted({str(r) for r in group["reason"].dropna() if str(r)}))[:80],
            ])  # fmt: skip
    columns = ["attack", "status", "victims", "PSNR dB", "best", "SSIM", "above blind dB", "identified", "reason"]
    print_table("Medians over victims (best: the highest PSNR; identified: share)", columns, rows)


def _print_membership(scores: Any) -> None:
    rows = [
        [
            name,
            f"{found['n_members']} and {found['n_others']}",
            f"{number(found['auc'], 3)} {_ends(found, 'auc')}".strip(),
            f"{number(found['tpr_1pct'], 3)} {_ends(found, 'tpr_1pct')}".strip(),
            found["verdict"],
        ]
        for one in scores
        for name, found in one.membership.items()
    ]
    if rows:
        columns = ["statistic", "members and others", "AUC [95 %]", "TPR at 1 % FPR [95 %]", "verdict"]
        print_table("Membership, over the candidates of all victims", columns, rows)


def _ends(found: Any, name: str) -> str:
    low, high = found[f"{name}_low"], found[f"{name}_high"]
    return "" if low is None else f"[{number(low, 3)}, {number(high, 3)}]"
