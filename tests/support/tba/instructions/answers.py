"""Right and wrong responses to instructions, built from their constraints alone."""

import json
from collections.abc import Sequence

from tba.tasks.instructions.constraints import Constraint

FILLER = (
    "The water moves under the stones.", "The wind turns the leaves.", "A bird sits on the roof.",
    "The train arrives at noon.", "He walks to the station.", "She reads a book in the kitchen.",
    "They eat soup at the table.", "The dog sleeps in the sun.",
)  # fmt: skip
"""Plain English without commas, and without any of the words that constraints forbid."""
WORDS_WITH = {
    "b": "bubble", "c": "circus", "f": "coffee", "g": "giggle", "k": "kick", "m": "mummy", "p": "puppet",
    "v": "vivid", "w": "willow", "y": "yearly", "u": "unusual", "d": "daddy",
}  # fmt: skip
"""A word with at least two of each letter that constraints count."""


def right_answer(constraints: Sequence[Constraint]) -> str:
    """Return a short response that keeps all constraints."""
    wanted = {constraint.kind: constraint.arguments for constraint in constraints}
    units = _units(wanted)
    if "detectable_format:json_format" in wanted:
        return json.dumps({"text": " ".join(units)})
    text = _divided(units, wanted)
    if "detectable_format:title" in wanted:
        text = f"<<The answer>>\n{text}"
    if "combination:two_responses" in wanted:
        text = f"{text}\n******\n{FILLER[1]}"
    if "combination:repeat_prompt" in wanted:
        text = f"{wanted['combination:repeat_prompt']['prompt_to_repeat']} {text}"
    if "detectable_content:postscript" in wanted:
        text = f"{text}\n{wanted['detectable_content:postscript']['postscript_marker']} Write back."
    if "startend:end_checker" in wanted:
        text = f"{text}\n{wanted['startend:end_checker']['end_phrase']}"
    if "startend:quotation" in wanted:
        text = f'"{text}"'
    if "change_case:english_capital" in wanted:
        return text.upper()
    return text.lower() if "change_case:english_lowercase" in wanted else text


def _units(wanted: dict) -> list[str]:
    units = [FILLER[0]]
    if arguments := wanted.get("keywords:existence"):
        units.append(" ".join(arguments["keywords"]) + ".")
    if arguments := wanted.get("keywords:frequency"):
        units.append(" ".join([arguments["keyword"]] * arguments["frequency"]) + ".")
    if arguments := wanted.get("keywords:letter_frequency"):
        units.append(" ".join([WORDS_WITH[arguments["letter"]]] * ((arguments["let_frequency"] + 1) // 2)) + ".")
    if arguments := wanted.get("detectable_content:number_placeholders"):
        units.append("[name] " * arguments["num_placeholders"] + "is here.")
    if arguments := wanted.get("detectable_format:number_highlighted_sections"):
        units.append("*here* " * arguments["num_highlights"] + "it is.")
    has_case = any(kind.startswith("change_case") for kind in wanted)  # which needs a language that can be told
    length = wanted.get("length_constraints:number_words", {"relation": "at least", "num_words": 20 * has_case})
    least = length["num_words"] if length["relation"] == "at least" else 10 * has_case
    for sentence in FILLER[1:]:
        if sum(len(unit.split()) for unit in units) < least:
            units.append(sentence)
    return units


def _divided(units: list[str], wanted: dict) -> str:
    """Return the text of the units, divided into as many parts as the constraints say."""
    whole = " ".join(units)
    if arguments := wanted.get("length_constraints:number_paragraphs"):
        return "\n***\n".join([whole, *FILLER[1 : arguments["num_paragraphs"]]])
    if arguments := wanted.get("length_constraints:nth_paragraph_first_word"):
        paragraphs = [whole, *FILLER[1 : arguments["num_paragraphs"]]]
        nth = arguments["nth_paragraph"] - 1
        paragraphs[nth] = f"{arguments['first_word'].title()} {paragraphs[nth]}"
        return "\n\n".join(paragraphs)
    if arguments := wanted.get("detectable_format:number_bullet_lists"):
        return "\n".join(f"* {it}" for it in [whole, *("Next." for _ in range(arguments["num_bullets"] - 1))])
    if arguments := wanted.get("detectable_format:multiple_sections"):
        names = [f"{arguments['section_spliter']} {i + 1}" for i in range(arguments["num_sections"])]
        return "\n".join(f"{name}\n{it}" for name, it in zip(names, [whole, "Next.", "Enough."], strict=False))
    return whole


def wrong_answer(constraint: Constraint) -> str:
    """Return a response that almost keeps a constraint."""
    arguments = constraint.arguments
    match constraint.kind:
        case "keywords:existence":
            return " ".join(arguments["keywords"][1:]) + " and nothing else."
        case "keywords:frequency":
            return " ".join([arguments["keyword"]] * (arguments["frequency"] - 1)) + "."
        case "keywords:forbidden_words":
            return f"This is {arguments['forbidden_words'][-1].upper()}."
        case "keywords:letter_frequency":
            return arguments["letter"] * (arguments["let_frequency"] - 1)
        case "length_constraints:number_words":
            return "word " * (arguments["num_words"] - (arguments["relation"] == "at least"))
        case "length_constraints:number_paragraphs":
            return "\n***\n".join(["More."] * (arguments["num_paragraphs"] + 1))
        case "length_constraints:nth_paragraph_first_word":
            return f"Well {arguments['first_word']}.\n\n" * arguments["num_paragraphs"]
        case "detectable_content:number_placeholders":
            return "[name] " * (arguments["num_placeholders"] - 1) + "(name)"
        case "detectable_content:postscript":
            return "Write back. PS: soon."
        case "detectable_format:number_bullet_lists":
            return "* More.\n" * (arguments["num_bullets"] + 1)
        case "detectable_format:number_highlighted_sections":
            return "*here* " * (arguments["num_highlights"] - 1) + "*there"
        case "detectable_format:multiple_sections":
            return "".join(f"{arguments['section_spliter']} {i + 1}\n" for i in range(arguments["num_sections"] - 1))
        case "detectable_format:json_format":
            return '{"text": "almost"'
        case "detectable_format:title":
            return "<a title>\nText."
        case "combination:two_responses":
            return "The same.\n******\nThe same."
        case "combination:repeat_prompt":
            return f"Well: {arguments['prompt_to_repeat']}"
        case "startend:end_checker":
            return f"{arguments['end_phrase']} Or not."
        case "startend:quotation":
            return '"Almost.'
        case "change_case:english_capital":
            return "THE DOG SLEEPS IN THE SUN AND THE BIRD SINGS IN THE TREe."
        case "change_case:english_lowercase":
            return "The dog sleeps in the sun and the bird sings in the tree."
        case "punctuation:no_comma":
            return "One, two."
    raise AssertionError(constraint.kind)
