"""The topics of our prompts, the forms of their requests, and the words that their constraints name.

Each list is divided once and for all: every fourth entry belongs to the split `test`, the others to `train`. So no
topic and no word of the one split occurs in the other.
"""

TOPICS = {
    "weather": (
        "the first snow of the year", "a summer storm", "fog in the morning", "a rainbow", "the north wind",
        "a very hot day", "rain on a tent", "a frozen lake", "the smell of rain", "a cloudy week", "an early spring",
        "falling leaves", "a flood", "thunder at night", "a mild winter", "a dry summer",
    ),
    "animals": (
        "an old dog", "a cat on a roof", "penguins", "a talking parrot", "bees", "a lost sheep", "whales", "owls",
        "a clever fox", "elephants", "ants", "a goldfish", "horses", "a shy hedgehog", "spiders", "wolves",
        "butterflies", "a donkey", "sea turtles", "a squirrel in the park",
    ),
    "food": (
        "fresh bread", "hot chocolate", "a pot of soup", "street food", "a birthday cake", "green tea", "apples",
        "pancakes for breakfast", "a spicy curry", "cheese", "a picnic", "ice cream", "homemade jam", "pizza",
        "a family recipe", "vegetables", "coffee", "noodles", "a bad restaurant", "honey",
    ),
    "places": (
        "a small village", "the desert", "an island without roads", "a busy market", "the public library",
        "a lighthouse", "a deep forest", "the old harbour", "a mountain hut", "a big city at night", "a castle",
        "the beach in winter", "a rose garden", "an empty theatre", "the local museum", "a river with many bridges",
        "a farm", "the underground", "a waterfall", "a quiet square",
    ),
    "travel": (
        "a night train", "a long flight", "a trip by bicycle", "a missed bus", "a holiday at home", "hitchhiking",
        "a road trip", "lost luggage", "a sailing boat", "camping", "a walk without a map", "the first day abroad",
        "a hotel by the sea", "postcards", "a crowded ferry", "a hike in the hills",
    ),
    "work": (
        "a job interview", "the first day at work", "a boring meeting", "working from home", "a strike", "a bakery",
        "a busy nurse", "firefighters", "a good boss", "night shifts", "a lunch break",
        "the last day before a holiday", "a teacher", "a fisherman", "a small shop", "a tailor", "a tired waiter",
        "an unpaid bill",
    ),
    "home": (
        "a leaking tap", "noisy neighbours", "a new sofa", "spring cleaning", "the kitchen table", "a locked door",
        "a creaking staircase", "moving to another flat", "a messy room", "a house plant", "an open fire",
        "a broken window", "the laundry", "a balcony", "an old clock", "a box in the attic", "a missing sock",
        "a warm blanket",
    ),
    "things": (
        "a red umbrella", "a pair of shoes", "a wooden spoon", "a map", "a mirror", "an old photograph", "a candle",
        "a paper boat", "a guitar", "a letter without a sender", "a magnet", "a lost key", "a telescope", "a kite",
        "a pocket watch", "a ladder", "a puzzle with a missing piece", "glasses", "a drum", "a typewriter",
    ),
    "technology": (
        "robots", "a slow computer", "solar panels", "the telephone", "video games", "electric cars",
        "a forgotten password", "space travel", "a smart fridge", "printers", "satellites", "windmills", "a drone",
        "the radio", "artificial intelligence", "a broken lift", "online shopping", "cameras",
    ),
    "learning": (
        "learning to swim", "a school trip", "the alphabet", "mathematics", "a difficult exam", "a foreign language",
        "learning to cook", "the first day of school", "homework", "a good book", "drawing", "riding a bicycle",
        "a science experiment", "handwriting", "playing the piano", "history", "chess", "learning to dance",
    ),
    "people": (
        "a grandmother", "twins", "a new friend", "a kind stranger", "a shy child", "an inventor", "a clown",
        "a famous singer", "a pirate", "an explorer", "a lazy king", "a lonely giant", "a baby", "a detective",
        "a painter", "a neighbour who helps", "a football team", "a poet",
    ),
    "life": (
        "friendship", "patience", "a good night's sleep", "making mistakes", "a surprise party", "saying sorry",
        "growing old", "courage", "a lucky day", "boredom", "homesickness", "a promise", "laughing", "a secret",
        "a wedding", "being late", "saving money", "silence", "a new year", "a farewell",
    ),
    "nature": (
        "the moon", "volcanoes", "the stars", "mushrooms", "an old oak tree", "the sea", "a cave", "grass", "coral",
        "sunflowers", "earthquakes", "the sunrise", "a pond", "seeds", "the planet Mars", "sand", "icebergs", "moss",
    ),
    "sport": (
        "running in the rain", "a tennis match", "swimming", "yoga", "a marathon", "skiing", "a lost game",
        "table tennis", "climbing", "ice skating", "a rowing boat", "basketball", "a morning walk", "fishing",
        "surfing", "juggling",
    ),
}  # fmt: skip
"""Topics by theme. Each topic fits each form."""

FORMS = (
    "Explain {topic} to a child in a few words.",
    "Write a very short poem about {topic}.",
    "Tell a very short story about {topic}.",
    "Write a text message to a friend about {topic}.",
    "Give a piece of advice about {topic}.",
    "Write a short note about {topic}.",
    "Write a few words about {topic} for a diary.",
    "Write a brief news item about {topic}.",
    "Say briefly what people like about {topic}.",
    "Describe {topic} briefly.",
    "Write a slogan about {topic}.",
    "Write a short toast to {topic}.",
    "Write a short message to a colleague about {topic}.",
    "Write the first lines of a song about {topic}.",
    "Write a short joke about {topic}.",
    "Give a brief opinion about {topic}.",
)
"""Requests for short texts, so that responses end within the limit."""

KEYWORDS = (
    "river", "yellow", "window", "music", "slowly", "garden", "bridge", "always", "paper", "light", "market", "winter",
    "brave", "circle", "story", "wonder", "table", "road", "silver", "gentle", "letter", "engine", "island", "quiet",
    "morning", "colour", "pocket", "finally", "stone", "ocean", "dream", "simple", "basket", "corner", "future",
    "green", "hand", "machine", "secret", "summer", "voice", "village", "warm", "wooden", "bright", "honest",
    "together", "tiny", "evening", "forest", "laugh", "number", "orange", "perhaps", "promise", "round", "school",
    "travel", "water", "wild",
)  # fmt: skip
"""Words that a response must have."""

AVOIDED = (
    "very", "important", "great", "also", "beautiful", "world", "many", "people", "good", "time", "like", "life",
    "day", "new", "love", "feel", "best", "help", "way", "small", "often", "little", "make", "know", "just", "really",
    "long", "much", "first", "old", "never", "around", "place", "something", "thing", "every", "more", "even", "need",
    "well",
)  # fmt: skip
"""Words that a response must not have."""

FIRST_WORDS = (
    "today", "imagine", "once", "maybe", "yesterday", "nobody", "sometimes", "here", "listen", "welcome", "everyone",
    "suddenly", "usually", "tomorrow", "picture", "somewhere",
)  # fmt: skip

LAST_PHRASES = (
    "That is all.", "Try it yourself.", "What do you think?", "See you soon.", "The end.", "Ask me again.",
    "Nothing else matters.", "Take care.", "And so it goes.", "Who would have guessed?", "Enjoy the moment.",
    "Let us begin.", "It was worth it.", "Tell your friends.", "Keep it simple.", "That was close.",
)  # fmt: skip

LETTERS = ("b", "c", "f", "g", "k", "m", "p", "v", "w", "y", "u", "d")
PLACEHOLDERS = ("name", "date", "place", "time", "address", "title", "price", "city")


def part(split: str, entries: tuple[str, ...]) -> tuple[str, ...]:
    """Return the entries of a list that belong to a split."""
    return tuple(entry for i, entry in enumerate(entries) if (i % 4 == 3) == (split == "test"))
