// stories.c: the built-in corpus: a grammar of children's stories, and the code that writes them.
// See stories.h.
//
// A rule is a name and a list of options; an option is a text with slots in braces:
//   {rule}        an option of that rule, drawn now
//   {role=rule}   the same, and the words are stored for the rest of the story under the name of
//                 the role
//   {role}        the stored words
//   {role.form}   an option of the rule "<rule the role was drawn from>.form": after {hero=girl},
//                 {hero.he} is drawn from girl.he: "she"
//   {Slot}        any of these with its first letter in upper case
// The word "a" becomes "an" before a, e, i, o and u. Spelling decides, so no list has words like
// "hour" or "unicorn".
//
// Weights. Options are listed from frequent to rare, in octaves: the first 4, the next 8, the next
// 16, ...; an incomplete last octave is part of the one before it. All octaves are equally likely,
// and so are the options within one. The frequencies follow Zipf's law in steps.
//
// One derivation per text. No text of a rule is the beginning of another text of the same rule, in
// whole words and punctuation: if one option could continue like another, it ends in a comma or
// full stop of its own. A slot is never followed by a letter. So a parser going from left to right
// always knows which option was drawn.
#include "stories.h"
#include "../llmc/run/util.h"
#include "../llmc/rand.h"
#include <stdbool.h>

// -------------------------------------------------------------------------------------------------
// The grammar: first how stories go, then the words.

#define OPTIONS(...)                                                    \
    (int)(sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *)), \
    (const char *const[]){__VA_ARGS__}

static const StoryRule RULES[] = {
    {"story", OPTIONS("{opening} {plot} {ending}")},
    {"plot", OPTIONS("{lost}", "{trip}", "{bake}", "{rescue}", "{surprise}", "{quarrel}")},

    // Who: a child, and an animal that is the child's friend. Every story fills the roles hero,
    // friend and kind.
    {"opening", OPTIONS("Once there was {child}. {friendship}",
                        "{Home} lived {child}. {friendship}", "{Child} lived {home}. {friendship}",
                        "Once upon a time, {child} {went} to the {vast} {wild}. {friendship}",
                        "Long ago, {child} lived {home}. {friendship}",
                        "This is the story of {child} and {pal}.",
                        "There once was {child} who loved {hue} {treasure}. {friendship}",
                        "Have you heard of {child} and {pal}?")},
    {"child", OPTIONS("a {trait} girl named {hero=girl}", "a {trait} boy named {hero=boy}")},
    {"pal",
     OPTIONS("{friend=lady} the {coat} {kind=animal}", "{friend=lad} the {coat} {kind=animal}")},
    {"friendship",
     OPTIONS("{Hero.his} {best} friend was {pal}.", "{Hero.he} liked to {play} with {pal}.",
             "Every {daytime}, {hero.he} {went} to the {vast} {wild} with {pal}.",
             "{Hero} and {pal} liked to {play}.", "{Hero.his} {trait} {man} gave {hero.him} {pal}.",
             "{Hero.he} was never {sad}, for {hero.he} had {pal}.")},
    {"home",
     OPTIONS("in a {homely} {house} by the {vast} {scenery}", "near a {homely} {house}",
             "near the {vast} {scenery}", "between a {vast} {scenery} and a {vast} {wild}")},
    {"when", OPTIONS("One {weather} {daytime},", "On a {weather} {weekday},",
                     "One {weather} {daytime} in {season},", "One day,", "After {meal},")},
    {"inside", OPTIONS("under the {homely} {furniture}", "in the {homely} {room}",
                       "behind the {homely} {furniture}", "near the {homely} {furniture}")},
    {"outside", OPTIONS("under the {leafy} {plant}", "near the {homely} {landmark}",
                        "behind the {leafy} {plant}", "by the {homely} {landmark}")},

    // Something is lost. Roles: color, thing.
    {"lost", OPTIONS("{loss} {sorrow} {comfort} {search} {discovery} {joy}")},
    {"loss", OPTIONS("{When} {hero} lost {hero.his} {belonging} at the {vast} {wild}.",
                     "{When} {hero} {mislaid} {hero.his} {belonging}.",
                     "{When} a {worn} {creature} stole the {belonging} of {hero}.",
                     "{When} a {strong} wind took the {belonging} of {hero}.")},
    {"belonging", OPTIONS("{fine} {color=hue} {thing=toy}", "{fine} {color=hue} {thing=garment}")},
    {"toy.use", OPTIONS("play with it", "keep it {inside}", "show it to {hero.his} {woman}")},
    {"garment.use", OPTIONS("wear it", "put it on", "take it to the {homely} {shop}")},
    {"mislaid", OPTIONS("could not find", "dropped", "forgot", "missed", "mislaid", "looked for")},
    {"strong", OPTIONS("strong", "cold", "sudden", "wild", "rough", "howling", "fierce")},
    {"sorrow", OPTIONS("{Who} {felt} {very} {sad}.", "{Who} {felt} {sad} and {wept}.",
                       "{Who} {wept} {inside}.", "{Who} {felt} {very} {sad} and {wept}.")},
    {"wept", OPTIONS("cried", "wept", "sobbed", "sighed", "sat down", "sulked", "hid", "frowned",
                     "moped", "stayed", "trembled")},
    {"comfort",
     OPTIONS("'{Soothe},' {said} {friend} {kindly}. '{Offer}.'",
             "'{Offer},' {said} {friend} {kindly}.", "'{Soothe},' {said} the {kind} {kindly}.",
             "'{Offer},' {said} the {trait} {kind}.")},
    {"soothe",
     OPTIONS("do not cry", "do not worry", "cheer up", "be brave", "all will be well", "come here",
             "hush", "never fear", "you are not alone", "trust me", "do not be {sad}")},
    {"offer", OPTIONS("I will help", "we can try", "let us go", "I have an idea",
                      "I know what to do", "follow me", "wait here", "we need a plan",
                      "we must be {trait}", "let us ask the {worker}", "two are better than one")},
    {"search", OPTIONS("They {looked} {inside}, but found only a {worn} {junk}.",
                       "They {looked} {inside}, and then they {looked} {outside}.",
                       "{Friend} {looked} {inside} and {hero} {looked} {outside}.",
                       "They {looked} for {period} and found {number} {worn} {findings}.",
                       "They {looked} {outside}, but met only a {trait} {worker}.")},
    {"discovery", OPTIONS("{Then} {friend} {spotted} the {color} {thing} {outside}!",
                          "{Then} a {worn} {creature} {spotted} the {thing} {outside}!",
                          "{Then} {who} {spotted} the {thing} {inside}!",
                          "{Then} {who} {looked} {outside}, and there was the {thing}!")},
    {"joy", OPTIONS("{Who} {felt} {very} {happy} and gave {friend} a {big} {hug}.",
                    "'My {best} {kind}!' {said} {hero} {kindly}.",
                    "{Who} {felt} {happy}, and {friend} {danced} {kindly}.",
                    "{Who} {felt} so {happy} that {hero.he} {danced}.",
                    "{Friend} {felt} {very} {happy} and {danced}.",
                    "They {danced} {kindly}, and {hero} {felt} {very} {happy}.",
                    "'Thank you,' {said} {hero} {kindly} and {danced}.")},

    // Bad weather on a trip. Roles: place, storm.
    {"trip", OPTIONS("{setout} {clouds} {fear} {shelter} {calm} {joy}")},
    {"setout",
     OPTIONS("One {fair} {daytime}, {hero} and {friend} {went} to the {vast} {place=wild} "
             "to {outing}.",
             "One {fair} {daytime} in {season}, {hero} took {friend} to the {vast} {place=wild}.",
             "'Let us go to the {vast} {place=wild}, {hero},' {said} {friend} "
             "one {fair} {daytime}.",
             "On a {fair} {weekday}, {hero} {went} to the {vast} {place=wild} with {friend} "
             "to {outing}.")},
    {"outing", OPTIONS("look for {hue} {treasure}", "{play}", "pick {treasure}",
                       "draw a {coat} {creature}", "feed the {coat} {creature}")},
    {"clouds", OPTIONS("{Then} it began to {storm=downpour}.",
                       "{Then} a {strong} wind brought {storm=downpour}.",
                       "{Then} a {hue} cloud came, and it began to {storm=downpour}.")},
    {"downpour", OPTIONS("rain", "snow", "thunder", "hail", "sleet", "drizzle")},
    {"fear", OPTIONS("{Who} {felt} {very} {scared}, but {friend} {felt} {happy}.",
                     "{Friend} {felt} {scared}. '{Soothe},' {said} {hero} {kindly}.",
                     "'I am {very} {scared},' {said} {hero}. '{Soothe},' {said} the {kind}.",
                     "{Who} {felt} {scared}. '{Offer},' {said} {friend} {kindly}.")},
    {"shelter", OPTIONS("They {hid} {outside} and ate {food}.",
                        "They {went} to a {homely} {house} and {hid} {inside}.",
                        "They {hid} {outside} for {period}.",
                        "A {trait} {worker} gave them {food} and a {fine} {garment}.")},
    {"calm", OPTIONS("{Then} a {fine} rainbow stood over the {place}.",
                     "The {storm} stopped, and a {coat} {creature} {danced} {kindly}.",
                     "{Then} the {place} was full of {fine} {hue} {treasure}.",
                     "After the {storm} they found {number} {fine} {hue} {treasure}.")},

    // Something is baked for somebody. Roles: elder, taste, dish, need.
    {"bake", OPTIONS("{wish} {lack} {errand} {mix} {tasting}")},
    {"someone", OPTIONS("{elder=woman}", "{elder=man}")},
    {"wish",
     OPTIONS("{When} {hero} wanted to bake a {taste=flavor} {dish=pastry} "
             "for {hero.his} {trait} {someone}.",
             "{When} {hero} and {friend} made a {taste=flavor} {dish=pastry} "
             "for {hero.his} {someone}.",
             "{When} the {trait} {someone} of {hero} asked for a {taste=flavor} {dish=pastry}.")},
    {"lack", OPTIONS("But a {worn} {creature} had eaten the {need=ingredient}.",
                     "But the {homely} {room} had no {need=ingredient}.",
                     "But they had no {need=ingredient}, only {number} {worn} {findings}.")},
    {"errand", OPTIONS("They {went} to the {homely} {shop} for {need}.",
                       "A {trait} {worker} gave them {need} and {number} {findings}.",
                       "{Then} {friend} {spotted} some {need} {inside}.",
                       "'{Offer},' {said} {friend} and {went} to the {homely} {shop}.")},
    {"mix", OPTIONS("{Hero} stirred {kindly}, and {friend} {danced} {kindly}.",
                    "They mixed it in a {fine} {hue} {bowl} for {period}.",
                    "{Then} the {homely} {house} smelled of {taste} and {flavor}.",
                    "{Friend} dropped the {fine} {bowl} and {felt} {very} {sad}.")},
    {"bowl", OPTIONS("bowl", "pot", "pan", "jug", "dish", "kettle", "tin")},
    {"tasting", OPTIONS("'The {best} {dish} of all!' {said} {hero.his} {elder} {kindly}.",
                        "{Hero.his} {elder} {felt} {very} {happy} and {danced}.",
                        "{Hero.his} {elder} shared it with {hero} and a {trait} {worker}.",
                        "The {elder} took a {big} bite and {danced} {kindly}.")},

    // A small animal needs help. Role: baby.
    {"rescue", OPTIONS("{cry} {trouble} {pity} {care} {thanks}")},
    {"cry", OPTIONS("{When} {hero} {spotted} a {coat} {baby=creature} {outside}.",
                    "{When} {friend} showed {hero} a {coat} {baby=creature} {inside}.",
                    "{When} {hero} heard a {sound} {outside}. It was a {coat} {baby=creature}.")},
    {"sound", OPTIONS("sound", "soft cry", "strange noise", "quiet whimper", "loud squeak",
                      "sad voice", "whisper")},
    {"trouble", OPTIONS("It {felt} {very} {sad}.", "It {felt} {very} {scared} and {wept}.",
                        "It was stuck in the {mud} and {felt} {sad}.",
                        "Its {limb} hurt, and it {felt} {very} {scared}.",
                        "'I am {very} {sad},' {said} the {baby} {kindly}.")},
    {"mud", OPTIONS("mud", "snow", "net", "thorns", "sand", "ice", "weeds")},
    {"limb", OPTIONS("leg", "foot", "head", "back", "neck", "mouth", "side")},
    {"pity",
     OPTIONS("'{Soothe},' {said} {hero} {kindly}.", "'{Soothe}, {trait} {baby},' {said} {friend}.",
             "'Poor {baby},' {said} {friend} {kindly}. '{Offer}.'",
             "{Who} {felt} {very} {sad}, too.")},
    {"care", OPTIONS("{Hero} gave it {food} and a {fine} {hue} {nest}.",
                     "They put the {baby} in a {fine} {hue} {nest}.",
                     "A {trait} {worker} {kindly} gave it {food}.",
                     "{Friend} {kindly} brought it {food} and a {fine} {toy}.",
                     "They fed it {food} {inside} for {period}.")},
    {"nest",
     OPTIONS("box", "basket", "blanket", "bucket", "hat", "drawer", "pillowcase", "suitcase")},
    {"thanks", OPTIONS("After {period}, the {baby} {felt} {happy} and {danced}.",
                       "The {baby} {kindly} gave {hero} a {fine} {hue} {junk}.",
                       "{Then} the {baby} {went} home to its {woman} and {danced}.",
                       "The {baby} {felt} {very} {happy} and {danced} {kindly}.")},

    // A present is made. Roles: elder, gift.
    {"surprise", OPTIONS("{birthday} {poor} {making} {unwrapping}")},
    {"birthday",
     OPTIONS("{When} the {trait} {someone} of {hero} wanted a {fine} {hue} {gift=present}.",
             "{When} {hero} wanted to give {hero.his} {someone} a {fine} {hue} {gift=present}.",
             "'My {someone} needs a {fine} {hue} {gift=present},' {said} {hero} one {weather} "
             "{daytime}.",
             "{When} {hero.his} {someone} {felt} {sad}, so {hero} wanted a {fine} {gift=present} "
             "for {elder.him}.")},
    {"poor", OPTIONS("But {hero} had only {number} {money}.",
                     "At the {homely} {shop} a {gift} cost {number} {money}.",
                     "But the {homely} {shop} had only {worn} {findings}.",
                     "But {who} had no {money} and {felt} {sad}.")},
    {"money", OPTIONS("coins", "pennies", "dollars", "cents", "dimes", "nickels", "pounds")},
    {"making",
     OPTIONS("'{Offer},' {said} {friend}. They made it of {hue} {material} and {trimming}.",
             "{Friend} brought {hue} {material} and {number} {trimming}.",
             "A {trait} {worker} gave them {hue} {material} and {number} {trimming}.",
             "They worked {inside} with {hue} {material} and {trimming}.")},
    {"unwrapping", OPTIONS("'The {best} {gift} of all!' {said} {hero.his} {elder} {kindly}.",
                           "{Elder.he} {felt} {very} {happy} and gave {hero} a {big} {hug}.",
                           "The {elder} {felt} {happy} and put the {gift} {inside}.",
                           "The {elder} {danced} {kindly}, and they had {dessert} for {meal}.")},

    // Two friends quarrel. Roles: color, thing.
    {"quarrel", OPTIONS("{prize} {dispute} {anger} {sorrow} {peace} {joy}")},
    {"prize", OPTIONS("{When} {hero} and {friend} {spotted} a {belonging} {outside}.",
                      "{When} a {trait} {worker} gave {hero} and {friend} a {belonging}.",
                      "{When} {friend} showed {hero} a {belonging}.")},
    {"dispute", OPTIONS("'It is mine!' {said} {hero}. 'No, mine!' {said} {friend}.",
                        "Both {felt} {angry} and wanted the {thing}.",
                        "{Hero} took the {color} {thing}, but {friend} {felt} {angry}.")},
    {"anger", OPTIONS("{Friend} {felt} {very} {angry} and {went} to the {vast} {wild}.",
                      "{Who} {felt} {angry} and hid the {thing} {inside}.",
                      "They pulled for {period} until the {thing} fell {mishap}.",
                      "{Friend} {felt} {angry} and {hid} {outside} for {period}.")},
    {"angry", OPTIONS("angry", "cross", "furious", "mad", "jealous", "annoyed", "bitter")},
    {"mishap", OPTIONS("into the {mud}", "in two", "down", "apart")},
    {"peace", OPTIONS("'I am sorry,' {said} {hero} {kindly}. '{Amends}.'",
                      "'I was {angry},' {said} {friend} {kindly}. '{Amends}.'",
                      "{Then} the {kind} {felt} {sad}. '{Amends},' {friend.he} {said}.",
                      "'{Amends},' {said} {hero.his} {trait} {woman} {kindly}.")},
    {"amends", OPTIONS("you can have it", "we can share it", "let us take turns",
                       "take my {fine} {toy}", "let us {play}", "now we can both {thing.use}")},

    // How it ends.
    {"ending", OPTIONS("That {night}, {hero} dreamed of {number} {hue} {dream}.",
                       "They {went} home and ate {dessert} for {meal}.",
                       "'{Closing},' {said} {friend} {kindly}.", "From that day on, they {habit}.",
                       "And so {who} learned that {moral}.",
                       "{Who} told {hero.his} {trait} {relative} about it and {danced}.",
                       "When the {moon} came out, they slept {inside}.")},
    {"night", OPTIONS("night", "evening")},
    {"moon", OPTIONS("moon", "stars")},
    {"relative", OPTIONS("{woman}", "{man}")},
    {"who", OPTIONS("{hero}", "{hero.he}")},
    {"habit", OPTIONS("shared everything", "met {outside} every {weekday}",
                      "never {felt} {sad} again", "{went} to the {vast} {wild} every {season}",
                      "helped every {creature} and {animal}", "were {trait} to everybody")},
    {"moral",
     OPTIONS("it is {good} to be {trait}", "a {trait} friend is the {best} friend",
             "it is {good} to share", "even a {coat} {creature} can be {trait}",
             "a {trait} heart is better than {number} {dream}", "friends help each other")},
    {"good", OPTIONS("good", "easy", "fun", "important", "wonderful", "right", "noble")},
    {"closing", OPTIONS("this was the {best} day of the {season}", "let us {play}",
                        "I am {very} {happy}", "you are {trait}")},

    // Names, and the pronouns that go with them.
    {"girl",
     OPTIONS("Lily", "Anna", "Mia", "Rose", "Emma", "Lucy", "Ella", "Sara", "Nora", "Maya", "Zoe",
             "Ruby", "Clara", "Alice", "Julia", "Molly", "Ivy", "Grace", "Leah", "Eva", "Tessa",
             "Amy", "Jane", "Nina", "Iris", "Kate", "Ada", "Elsa", "Holly", "Wendy", "Sophie")},
    {"boy", OPTIONS("Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Tim", "Noah", "Finn", "Adam",
                    "Luke", "Peter", "Daniel", "Henry", "Eric", "Oliver", "Theo", "Jacob", "David",
                    "Owen", "Simon", "Victor", "Hugo", "Martin", "Felix", "Arthur", "Paul", "Ian",
                    "Ralph", "Edgar", "Walter")},
    {"lady", OPTIONS("Daisy", "Luna", "Poppy", "Hazel", "Bella", "Willow", "Coco", "Clover",
                     "Maple", "Juniper", "Tulip", "Mimi", "Dolly", "Fern", "Pearl")},
    {"lad", OPTIONS("Pip", "Milo", "Rusty", "Biscuit", "Bruno", "Toby", "Patch", "Otto", "Chester",
                    "Oscar", "Barnaby", "Moss", "Acorn", "Thistle", "Ziggy")},

    {"girl.he", OPTIONS("she")},
    {"girl.him", OPTIONS("her")},
    {"girl.his", OPTIONS("her")},
    {"boy.he", OPTIONS("he")},
    {"boy.him", OPTIONS("him")},
    {"boy.his", OPTIONS("his")},
    {"woman.he", OPTIONS("she")},
    {"man.he", OPTIONS("he")},
    {"woman.him", OPTIONS("her")},
    {"man.him", OPTIONS("him")},
    {"lady.he", OPTIONS("she")},
    {"lad.he", OPTIONS("he")},

    {"woman", OPTIONS("mother", "grandmother", "aunt", "teacher", "sister", "neighbor", "nurse")},
    {"man", OPTIONS("father", "grandfather", "uncle", "brother", "cousin", "doctor", "gardener")},
    {"animal", OPTIONS("dog", "cat", "rabbit", "fox", "bear", "mouse", "duck", "squirrel", "owl",
                       "frog", "hedgehog", "pony", "turtle", "goat", "otter", "lamb", "badger",
                       "beaver", "raccoon", "hamster", "goose", "donkey", "parrot", "penguin",
                       "deer", "monkey", "elephant", "koala", "ferret", "lynx", "iguana")},
    {"creature", OPTIONS("bird", "bee", "butterfly", "snail", "chick", "crow", "calf", "cricket",
                         "ladybug", "toad", "piglet", "moth", "lizard", "crab", "swan", "dove",
                         "robin", "sparrow", "mole", "ant", "heron", "newt", "fawn", "wren",
                         "puffin", "seal", "beetle", "eagle", "magpie", "salamander")},
    {"worker",
     OPTIONS("baker", "farmer", "cook", "mailman", "sailor", "painter", "tailor", "shepherd",
             "carpenter", "fisherman", "librarian", "miller", "conductor", "pilot", "blacksmith")},

    // Adjectives of people and things.
    {"trait",
     OPTIONS("little", "kind", "happy", "young", "brave", "clever", "shy", "curious", "quiet",
             "funny", "gentle", "cheerful", "careful", "playful", "friendly", "loyal", "lively",
             "patient", "dreamy", "polite", "eager", "thoughtful", "helpful", "merry", "bold",
             "sensible", "stubborn", "modest", "lucky", "adventurous", "imaginative")},
    {"coat", OPTIONS("small", "brown", "white", "gray", "tiny", "black", "fat", "golden", "spotted",
                     "round", "old", "fluffy", "speckled", "striped", "silver")},
    {"hue", OPTIONS("red", "blue", "green", "yellow", "white", "pink", "orange", "purple", "brown",
                    "silver", "golden", "violet", "gray", "crimson", "scarlet", "turquoise",
                    "emerald", "ivory", "lilac", "indigo", "black", "amber")},
    {"very", OPTIONS("very", "so", "really", "quite", "rather", "terribly", "awfully")},
    {"sad", OPTIONS("sad", "upset", "unhappy", "lonely", "sorry", "worried", "gloomy", "miserable",
                    "tearful", "disappointed", "downcast", "helpless", "puzzled", "anxious")},
    {"happy",
     OPTIONS("happy", "glad", "proud", "cheerful", "pleased", "excited", "thankful", "joyful",
             "delighted", "grateful", "merry", "content", "relieved", "overjoyed", "amazed")},
    {"scared",
     OPTIONS("scared", "afraid", "frightened", "nervous", "startled", "alarmed", "uneasy")},
    {"best", OPTIONS("best", "nicest", "kindest", "sweetest", "finest", "dearest", "cleverest",
                     "loveliest", "greatest", "bravest", "warmest")},
    {"big", OPTIONS("big", "warm", "long", "great", "tight", "huge", "gentle", "tender", "enormous",
                    "mighty", "soft", "quick", "hearty", "sweet", "wonderful")},
    {"hug", OPTIONS("hug", "kiss", "smile", "squeeze", "cuddle", "pat", "cheer")},
    {"worn", OPTIONS("old", "dusty", "broken", "muddy", "rusty", "dirty", "cracked", "forgotten",
                     "wet", "faded", "crooked", "moldy", "ancient", "ugly")},
    {"homely", OPTIONS("small", "cozy", "old", "little", "tidy", "pretty", "bright", "tiny",
                       "wooden", "crooked", "narrow", "humble", "empty", "quaint", "tall")},
    {"leafy", OPTIONS("old", "tall", "big", "green", "little", "crooked", "shady", "thick", "mossy",
                      "lonely", "hollow", "prickly", "leafy", "bent", "wild")},
    {"fine", OPTIONS("new", "little", "shiny", "pretty", "big", "lovely", "old", "favorite",
                     "precious", "tiny", "strange", "splendid", "painted", "heavy", "magic")},
    {"vast",
     OPTIONS("green", "quiet", "wide", "dark", "sunny", "windy", "distant", "misty", "secret",
             "silent", "beautiful", "peaceful", "famous", "mysterious", "sleepy")},
    {"kindly",
     OPTIONS("softly", "kindly", "gently", "quietly", "happily", "warmly", "sweetly", "cheerfully",
             "slowly", "shyly", "calmly", "proudly", "politely", "bravely", "eagerly", "firmly",
             "wisely", "timidly", "brightly", "merrily", "tenderly")},
    {"then", OPTIONS("Then", "Soon", "At last", "Suddenly", "After that", "In the end",
                     "A little later", "Finally", "Before long", "By and by", "The next day",
                     "All at once", "Some time later", "That same day", "Much later")},
    {"felt", OPTIONS("was", "felt", "looked", "became", "grew", "seemed", "sounded")},
    {"went", OPTIONS("went", "walked", "ran", "hurried", "skipped", "marched", "rode", "tiptoed",
                     "wandered", "raced", "strolled", "traveled", "rushed", "cycled", "sailed")},
    {"looked", OPTIONS("looked", "searched", "peeked", "peered", "hunted", "crept", "crawled")},
    {"spotted",
     OPTIONS("saw", "found", "spotted", "noticed", "discovered", "glimpsed", "detected")},
    {"hid", OPTIONS("hid", "waited", "sat", "stayed", "huddled", "rested", "slept")},
    {"said",
     OPTIONS("said", "cried", "whispered", "called", "answered", "replied", "shouted", "murmured",
             "sang", "exclaimed", "explained", "promised", "announced", "laughed")},

    // When and where.
    {"weather", OPTIONS("sunny", "warm", "windy", "rainy", "cold", "cool", "cloudy", "bright",
                        "foggy", "stormy", "misty", "chilly", "dull", "frosty", "breezy")},
    {"fair", OPTIONS("sunny", "warm", "bright", "clear", "mild", "lovely", "golden")},
    {"season", OPTIONS("spring", "summer", "autumn", "winter")},
    {"daytime", OPTIONS("morning", "day", "afternoon", "evening")},
    {"weekday",
     OPTIONS("Sunday", "Monday", "Saturday", "Friday", "Tuesday", "Wednesday", "Thursday")},
    {"meal", OPTIONS("breakfast", "lunch", "dinner", "supper")},
    {"period", OPTIONS("an hour", "two days", "a week", "a long time", "three weeks", "half a day",
                       "a month", "many days", "a whole year", "ages")},
    {"house", OPTIONS("house", "cottage", "village", "hut", "town", "cabin", "castle", "tent",
                      "mill", "tower", "barn", "lighthouse", "palace", "inn", "treehouse")},
    {"scenery", OPTIONS("sea", "river", "forest", "lake", "hills", "woods", "meadow", "valley",
                        "desert", "bay", "swamp", "canal", "cliffs", "railway", "harbor")},
    {"wild", OPTIONS("park", "forest", "beach", "lake", "river", "garden", "meadow", "hill",
                     "field", "orchard", "pond", "mountain", "island", "shore", "jungle",
                     "waterfall", "prairie", "glade", "dunes", "vineyard", "cave")},
    {"shop", OPTIONS("market", "bakery", "store", "farm", "mill", "village", "dairy", "city",
                     "grocery", "fair", "square")},
    {"room",
     OPTIONS("kitchen", "bedroom", "attic", "garage", "cellar", "closet", "hallway", "pantry",
             "library", "bathroom", "playroom", "basement", "stable", "workshop", "laundry")},
    {"furniture",
     OPTIONS("bed", "table", "chair", "sofa", "desk", "bench", "cupboard", "rug", "piano", "stove",
             "bookcase", "dresser", "armchair", "wardrobe", "trunk")},
    {"plant", OPTIONS("tree", "bush", "hedge", "oak", "log", "rosebush", "pine", "willow", "cactus",
                      "birch", "elm", "maple", "haystack", "ivy", "fir")},
    {"landmark", OPTIONS("fence", "gate", "pond", "well", "bridge", "swing", "sandbox", "path",
                         "stream", "fountain", "road", "statue", "shed", "mailbox", "henhouse")},

    // Things.
    {"toy",
     OPTIONS("ball", "doll", "kite", "book", "drum", "boat", "bell", "whistle", "puzzle", "top",
             "marble", "balloon", "lantern", "flute", "basket", "pencil", "wagon", "trumpet",
             "teapot", "box", "mirror", "shovel", "train", "blanket", "robot", "feather", "ring",
             "notebook", "shell", "candle", "fiddle", "telescope", "compass", "globe", "bucket",
             "rattle", "paintbrush", "map", "magnet", "accordion")},
    {"garment", OPTIONS("hat", "scarf", "coat", "cap", "mitten", "shoe", "sweater", "jacket",
                        "boot", "sock", "ribbon", "belt", "glove", "raincoat", "apron", "slipper",
                        "vest", "dress", "shawl", "necklace", "bracelet", "umbrella", "crown")},
    {"junk", OPTIONS("stick", "leaf", "stone", "nail", "penny", "bone", "spoon", "button", "bottle",
                     "cork", "pin", "brick", "worm", "spider", "hammer", "jar", "fork", "rag",
                     "wire", "crumb", "eggshell")},
    {"findings", OPTIONS("feathers", "nuts", "buttons", "pebbles", "keys", "spiders", "ants",
                         "pins", "coins", "crumbs", "seeds", "bones", "eggs", "onions", "insects")},
    {"number", OPTIONS("two", "three", "four", "five", "six", "seven", "ten", "eight", "nine",
                       "twelve", "eleven", "twenty", "fifty", "forty", "a hundred")},
    {"material", OPTIONS("paper", "wood", "clay", "cloth", "straw", "wool", "string", "cardboard",
                         "silk", "wax", "velvet", "leather", "bark", "yarn", "cotton")},
    {"trimming",
     OPTIONS("shells", "flowers", "beads", "leaves", "stars", "glitter", "acorns", "ribbons",
             "petals", "pearls", "stripes", "bows", "sequins", "pictures", "hearts")},
    {"present", OPTIONS("card", "picture", "puppet", "mask", "scarf", "crown", "bracelet",
                        "necklace", "lamp", "bookmark", "vase", "pillow", "bag", "clock", "frame",
                        "cushion", "quilt", "purse", "calendar", "ornament", "album")},
    {"flavor",
     OPTIONS("apple", "honey", "lemon", "chocolate", "cherry", "carrot", "banana", "strawberry",
             "pumpkin", "ginger", "plum", "peach", "pear", "vanilla", "cinnamon", "walnut",
             "raspberry", "orange", "coconut", "almond", "apricot")},
    {"pastry", OPTIONS("cake", "pie", "tart", "pudding", "muffin", "pancake", "waffle", "cookie",
                       "loaf", "roll", "dumpling")},
    {"ingredient", OPTIONS("flour", "sugar", "butter", "milk", "cream", "salt", "yeast", "syrup",
                           "cheese", "oil", "baking powder")},
    {"food", OPTIONS("bread", "milk", "water", "seeds", "berries", "soup", "honey", "corn",
                     "lettuce", "cheese", "clover", "rice", "grass", "porridge", "oats")},
    {"treasure",
     OPTIONS("berries", "shells", "flowers", "mushrooms", "nuts", "pebbles", "feathers", "acorns",
             "daisies", "chestnuts", "treasure", "caterpillars", "pinecones", "fossils", "frogs")},
    {"dream", OPTIONS("stars", "clouds", "boats", "flowers", "birds", "horses", "dragons", "kites",
                      "fish", "castles", "balloons", "trains", "elephants", "butterflies", "whales",
                      "giants", "fairies", "mermaids", "rockets", "planets", "oceans", "pirates",
                      "comets", "owls", "dinosaurs")},
    {"dessert",
     OPTIONS("soup", "cake", "pancakes", "hot chocolate", "toast", "pizza", "noodles", "ice cream",
             "stew", "cookies", "potatoes", "sandwiches", "jam", "popcorn", "roasted apples")},

    // Verbs of people.
    {"play",
     OPTIONS("play", "sing", "dance", "run", "read", "swim", "draw", "explore", "climb trees",
             "build castles", "hike", "paint", "tell jokes", "fish", "count clouds")},
    {"danced",
     OPTIONS("danced", "giggled", "clapped", "sang a song", "smiled", "jumped up and down",
             "laughed", "cheered", "skipped home", "hopped around", "spun in circles",
             "hummed a tune", "did a cartwheel", "whistled", "rolled in the grass")},
};

const StoryGrammar STORY_GRAMMAR = {(int)(sizeof RULES / sizeof RULES[0]), RULES};

// -------------------------------------------------------------------------------------------------
// The code that writes a story.

#define ROLES 8
#define SLOT_BYTES 32
// which words of the story fill a role
typedef struct { char role[SLOT_BYTES]; const StoryRule *rule; size_t begin, length; } Memory;
typedef struct {
    char *text;
    size_t length;
    uint64_t key, choices;      // the next choice is number `choices` of the stream `key`
    double nats;                // -log of the probability of the choices so far
    bool capital;               // the next byte begins a {Slot}
    int memories;
    Memory memory[ROLES];
} Story;

static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
static bool is_vowel(char c) { return c && strchr("aeiou", c | 32); }

// Appends one byte: as a capital if a {Slot} begins; before a vowel the word "a" becomes "an".
static void put(Story *s, char c) {
    CHECK(s->length + 2 <= STORIES_MAX_BYTES,
          "expected stories of at most %d bytes, found a longer one\n"
          "  -> raise STORIES_MAX_BYTES in stories.h", STORIES_MAX_BYTES);
    char *end = s->text + s->length;
    bool article = s->length >= 2 && end[-1] == ' ' && (end[-2] | 32) == 'a' &&
                   (s->length == 2 || !is_letter(end[-3]));
    if (article && is_vowel(c)) {
        end[-1] = 'n';
        *end++ = ' ';
        s->length++;
    }
    *end = s->capital && is_letter(c) ? (char)(c & ~32) : c;
    s->length++;
    s->capital = false;
}

// Draws an option: first its octave, then its place there, with 32 random bits each. The relative
// error of a probability is below 2^-24.
static int choose(Story *s, int count) {
    int octaves = 1;
    while (4 * ((2 << octaves) - 1) <= count) octaves++;
    uint64_t bits = rand_at(s->key, s->choices++);
    int octave = (int)((bits >> 32) * (uint64_t)octaves >> 32), first = (4 << octave) - 4;
    int size = octave < octaves - 1 ? 4 << octave : count - first;
    s->nats += log((double)(octaves * size));
    return first + (int)((bits & 0xFFFFFFFFu) * (uint64_t)size >> 32);
}

static const StoryRule *find_rule(const char *name) {
    for (int i = 0; i < STORY_GRAMMAR.count; i++)
        if (RULES[i].name[0] == name[0] && !strcmp(RULES[i].name, name)) return &RULES[i];
    CHECK(false,
          "the stories have no rule '%s'\n  -> add it to RULES, or correct the slot that names it",
          name);
    return NULL;
}

static void tell_slot(Story *s, const char *slot, size_t n);

static void tell(Story *s, const StoryRule *rule) {
    for (const char *p = rule->option[choose(s, rule->count)]; *p; p++) {
        if (*p != '{') { put(s, *p); continue; }
        size_t n = strcspn(p + 1, "}");
        tell_slot(s, p + 1, n);
        p += n + 1;
    }
}

// One slot, without its braces: {rule}, {role=rule}, {role}, or {role.form}.
static void tell_slot(Story *s, const char *slot, size_t n) {
    char name[SLOT_BYTES], form[2 * SLOT_BYTES];
    CHECK(n > 0 && n < SLOT_BYTES && s->memories < ROLES,
          "expected slots below %d bytes and fewer than %d roles, found more at {%.40s\n"
          "  -> raise SLOT_BYTES or ROLES", SLOT_BYTES, ROLES, slot);
    memcpy(name, slot, n);
    name[n] = 0;
    if (!(name[0] & 32)) s->capital = true;
    name[0] |= 32;
    char *mark = strpbrk(name, "=."), type = mark ? *mark : ' ';
    if (mark) *mark++ = 0;

    Memory *m = s->memory, *end = s->memory + s->memories;
    while (m < end && strcmp(m->role, name)) m++;
    if (type == '=') {
        memcpy(m->role, name, sizeof name);
        m->rule = find_rule(mark);
        m->begin = s->length;
        s->memories++;
        tell(s, m->rule);
        if (s->text[m->begin] == ' ') m->begin++;                  // "a" before it has become "an"
        m->length = s->length - m->begin;
    } else if (type == '.') {
        CHECK(m < end, "{%.40s names a role without words\n  -> fill it earlier in the story",
              slot);
        tell(s, find_rule(check_format(form, sizeof form, "%s.%s", m->rule->name, mark)));
    } else if (m < end) {
        for (size_t i = 0; i < m->length; i++) put(s, s->text[m->begin + i]);
    } else {
        tell(s, find_rule(name));
    }
}

double stories_write(uint64_t seed, uint64_t index, char *text, size_t capacity, size_t *length) {
    CHECK(capacity >= STORIES_MAX_BYTES,
          "expected a buffer of at least %d bytes, found %zu\n  -> pass STORIES_MAX_BYTES",
          STORIES_MAX_BYTES, capacity);
    Story s = {.text = text, .key = rand_at(seed, index)};
    tell(&s, &RULES[0]);
    *length = s.length;
    return s.nats;
}

// One-to-one: 2 seed + validation is, and rand_mix is a bijection on 64 bits.
uint64_t stories_seed(uint64_t seed, int validation) {
    return rand_mix(2 * seed + (validation != 0));
}
