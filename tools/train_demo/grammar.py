"""The conversations of the built-in model: a small grammar of questions whose right answers are known.

Each kind of exchange is a function of a random generator that returns `(question, answer)`. A kind that uses what was said
before also gets the conversation's `memory`. `conversation` strings exchanges together; `exchange` draws one by its weight.
"""

NAMES = (
    "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karl Lena Mia Noah Olga Paul Rosa Sam Tom Vera Alice Bruno Cora "
    "Dora Erik Finn Hanna Ivan Julia Leo Maria Nina Oscar Peter Ruth Simon Tina Walter"
).split()


def pairs(text):
    """A dictionary from "key: value, key: value"."""
    return dict(pair.split(": ") for pair in text.split(", "))


CAPITALS = pairs(
    "France: Paris, Italy: Rome, Spain: Madrid, Germany: Berlin, Japan: Tokyo, Egypt: Cairo, Norway: Oslo, "
    "Greece: Athens, Poland: Warsaw, Austria: Vienna, Kenya: Nairobi, Peru: Lima, Cuba: Havana, Canada: Ottawa, "
    "Portugal: Lisbon, Ireland: Dublin, Sweden: Stockholm, Finland: Helsinki, Denmark: Copenhagen, Hungary: "
    "Budapest, China: Beijing, Russia: Moscow, Turkey: Ankara, England: London, Belgium: Brussels, Chile: "
    "Santiago"
)
COLOURS = pairs(
    "grass: green, snow: white, the sky: blue, coal: black, a lemon: yellow, a tomato: red, an orange: orange, "
    "chocolate: brown, milk: white, blood: red, the sea: blue, gold: yellow, a frog: green, an elephant: gray, a "
    "banana: yellow, the night: black"
)
SOUNDS = pairs(
    "cat: meow, dog: woof, cow: moo, duck: quack, sheep: baa, horse: neigh, pig: oink, owl: hoot, bee: buzz, "
    "snake: hiss, lion: roar, frog: ribbit"
)
OPPOSITES = pairs(
    "hot: cold, big: small, day: night, up: down, black: white, fast: slow, old: young, light: dark, happy: sad, "
    "open: closed, wet: dry, full: empty, left: right, good: bad"
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
PLACES = "the garden, the forest, the river, the market, the old mill, the beach, the hill, the library".split(", ")
ITEMS = (
    "a red ball, a small key, a warm coat, a silver coin, a round stone, a loaf of bread, a blue book, a paper boat, "
    "a green hat, a golden ring"
).split(", ")
SYSTEM = [
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Be kind.",
    "Answer in English.",
]
BEYOND = [
    "Who won the game last night?",
    "How do I fix my car?",
    "What is the price of {}?",
    "Who is the king of {}?",
    "How many people live in {}?",
    "What is the weather like in {}?",
    "Write a program that sorts a list.",
    "What is the meaning of life?",
    "How far is it to {}?",
    "Translate this into French.",
    "What time is it?",
    "Who wrote this book?",
    "How do I cook {}?",
    "Why is {} so expensive?",
    "When was {} built?",
]
SORRY = "I am sorry, I do not know that. I am only a very small demonstration model."


# --- kinds of exchange ------------------------------------------------------------------------------------------------


def capital(r, _memory):
    country = r.choice(list(CAPITALS))
    question = r.choice(
        ["What is the capital of {}?", "Which city is the capital of {}?", "Tell me the capital of {}."]
    )
    return question.format(country), f"The capital of {country} is {CAPITALS[country]}."


def where_is(r, _memory):
    country = r.choice(list(CAPITALS))
    return f"Where is {CAPITALS[country]}?", f"{CAPITALS[country]} is the capital of {country}."


def colour(r, _memory):
    thing = r.choice(list(COLOURS))
    return r.choice(["What color is {}?", "Which color is {}?"]).format(
        thing
    ), f"The color of {thing} is {COLOURS[thing]}."


def sound(r, _memory):
    animal = r.choice(list(SOUNDS))
    article = "an" if animal[0] in "aeiou" else "a"
    question = r.choice(["What does {} {} say?", "What sound does {} {} make?"]).format(article, animal)
    return question, f'{article.capitalize()} {animal} says "{SOUNDS[animal]}".'


def opposite(r, _memory):
    word = r.choice(list(OPPOSITES))
    return f"What is the opposite of {word}?", f"The opposite of {word} is {OPPOSITES[word]}."


def following(r, _memory):
    names = r.choice([DAYS, MONTHS])
    i = r.randrange(len(names))
    what = "day" if names is DAYS else "month"
    step, word = r.choice([(1, "after"), (-1, "before")])
    other = names[(i + step) % len(names)]
    return f"Which {what} comes {word} {names[i]}?", f"{other} comes {word} {names[i]}."


def arithmetic(r, _memory):
    a, b = r.randrange(11), r.randrange(11)
    if r.random() < 0.6:
        return f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
    a, b = max(a, b), min(a, b)
    return f"What is {a} minus {b}?", f"{a} minus {b} is {a - b}."


def larger(r, _memory):
    a, b = r.sample(range(21), 2)
    return f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}."


def count(r, _memory):
    last = r.randrange(3, 21)
    if r.random() < 0.7:
        return f"Count to {last}.", ", ".join(str(i) for i in range(1, last + 1)) + "."
    first = r.randrange(1, last - 1)
    return f"Count from {first} to {last}.", ", ".join(str(i) for i in range(first, last + 1)) + "."


def number_word(r, _memory):
    n = r.randrange(21)
    return f"How do you write {n} as a word?", f'The number {n} is written as "{NUMBERS[n]}".'


def greeting(r, _memory):
    hello = r.choice(["Hello!", "Hi!", "Good morning!", "Hello", "Hi there!", "Good evening!"])
    return hello, "Hello! How can I help you today?"


def introduction(r, memory):
    memory["name"] = name = r.choice(NAMES)
    hello = r.choice(["Hello, my name is {}.", "Hi, I am {}.", "My name is {}."]).format(name)
    return hello, f"Hello {name}, nice to meet you! How can I help you today?"


def what_is_my_name(r, memory):
    question = r.choice(["What is my name?", "Do you remember my name?", "Who am I?"])
    if "name" not in memory:
        return question, "I do not know your name. Please tell me."
    return question, f"Your name is {memory['name']}."


def gift(r, memory):
    memory["item"] = item = r.choice(ITEMS)
    return f"I have {item}.", f"That is nice. What do you do with {item}?"


def what_do_i_have(_r, memory):
    if "item" not in memory:
        return "What do I have?", "I do not know what you have. Please tell me."
    return "What do I have?", f"You have {memory['item']}."


def thanks(r, _memory):
    question = r.choice(["Thank you!", "Thanks!", "Thank you very much."])
    return question, "You are welcome! Is there anything else?"


def farewell(r, memory):
    name = f", {memory['name']}" if "name" in memory else ""
    return r.choice(["Goodbye!", "Bye!", "See you later."]), f"Goodbye{name}! Have a nice day."


def identity(r, _memory):
    question = r.choice(["Who are you?", "What are you?", "What is your name?", "Are you a robot?"])
    return question, (
        "I am a very small language model that comes with motet. I was made to show how it works, "
        "so please do not expect too much from me."
    )


def motet(r, _memory):
    question = r.choice(["What is motet?", "What does motet do?", "Tell me about motet."])
    return question, (
        "Motet is a server for language models. It talks to several people at once, "
        "and each of them gets the answer that they would get alone."
    )


def abilities(r, _memory):
    question = r.choice(["What can you do?", "What do you know?", "Help me.", "How can you help me?"])
    return question, (
        "I can tell short stories, count, add small numbers, and name capitals, colors and animal sounds. "
        "I also remember your name while we talk."
    )


def how_are_you(r, _memory):
    return r.choice(["How are you?", "How are you today?"]), "I am fine, thank you. How are you?"


def story(r, _memory):
    """One of three plots; the hero can be asked for."""
    hero, friend = r.sample(NAMES, 2)
    place, other_place = r.sample(PLACES, 2)
    item, animal = r.choice(ITEMS), r.choice(list(SOUNDS))
    article = "an" if animal[0] in "aeiou" else "a"
    question = r.choice(["Tell me a story.", "Can you tell me a story?", "Please write a short story."])
    if r.random() < 0.5:
        question = r.choice(["Tell me a story about {}.", "Write a short story about {}."]).format(hero)
    lost = (
        f"Once upon a time, {hero} went to {place}. There {hero} found {item} and wondered who had lost it. "
        f'Soon {friend} came along with {article} {animal}. "Is this yours?" asked {hero}. "Yes, thank you!" said {friend}. '
        f"Then they walked to {other_place} together, and the {animal} followed them. "
        f"From that day on, {hero} and {friend} were good friends."
    )
    rain = (
        f"One rainy day, {hero} was sitting near {place} and felt lonely. "
        f'Then {article} {animal} came and said "{SOUNDS[animal]}". {hero} laughed and followed the {animal} to {other_place}. '
        f'There {friend} was waiting with {item}. "Let us play until the rain stops," said {friend}. '
        f"They played all day, and in the evening the sun came out."
    )
    journey = (
        f"Long ago, {hero} wanted to see {place}. {friend} gave {hero} {item} for the journey. "
        f"On the way {hero} met {article} {animal} that was tired and sad. "
        f"{hero} carried the {animal} to {other_place} and gave it some water. "
        f'"{SOUNDS[animal].capitalize()}," said the {animal}, and that means thank you.'
    )
    return question, r.choice([lost, rain, journey])


def name_three(r, _memory):
    what, choices = r.choice(
        [("animals", sorted(SOUNDS)), ("colors", sorted(set(COLOURS.values()))), ("countries", sorted(CAPITALS))]
    )
    a, b, c = r.sample(choices, 3)
    text = f"{a}, {b} and {c}."
    return f"Name three {what}.", text[0].upper() + text[1:]


def unknown(r, _memory):
    question = r.choice(BEYOND)
    return question.format(r.choice([*CAPITALS, *CAPITALS.values(), *(item.split(" ", 1)[1] for item in ITEMS)])), SORRY


WEIGHTS = {
    capital: 8,
    where_is: 4,
    colour: 5,
    sound: 5,
    opposite: 4,
    following: 5,
    arithmetic: 10,
    larger: 5,
    count: 7,
    number_word: 4,
    greeting: 4,
    introduction: 8,
    what_is_my_name: 8,
    gift: 4,
    what_do_i_have: 4,
    thanks: 2,
    farewell: 2,
    identity: 4,
    motet: 3,
    abilities: 3,
    how_are_you: 2,
    story: 12,
    name_three: 2,
    unknown: 6,
}
# An answer of these kinds is one of many right ones.
OPEN = {story, name_three}


# --- conversations ----------------------------------------------------------------------------------------------------


def careless(r, question):
    """People leave out capitals and full stops."""
    if r.random() < 0.15:
        question = question.rstrip("?.!")
    if r.random() < 0.1:
        question = question[0].lower() + question[1:]
    return question


def exchange(r, memory):
    """One question and its answer, and the kind it is of."""
    (kind,) = r.choices(list(WEIGHTS), list(WEIGHTS.values()))
    question, answer = kind(r, memory)
    return kind, careless(r, question), answer


def turn(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def conversation(r):
    """One to five exchanges in ChatML."""
    memory, text = {}, ""
    if r.random() < 0.3:
        text += turn("system", r.choice(SYSTEM))
    for _ in range(r.randint(1, 5)):
        _, question, answer = exchange(r, memory)
        text += turn("user", question) + turn("assistant", answer)
    return text + "<|endoftext|>"
