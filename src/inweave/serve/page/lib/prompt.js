// LoRA tags of a prompt: <lora:name:0.8>, <lora:name:te=0.5,unet=0.8>. Cards only show them.

const TAG = /<(?:lora|lyco):([^<>]+)>/gi

/** @param {string} prompt @returns {Tag[]} */
export function parseTags(prompt) {
	return Array.from(prompt.matchAll(TAG), match => {
		const [name, ...fields] = match[1].split(":")
		const numbers = fields.flatMap(field => field.split(",")).map(field => field.split("="))
		const plain = numbers.filter(field => field.length === 1).map(field => Number(field[0]))
		const by = Object.fromEntries(
			numbers.filter(field => field.length === 2).map(([key, value]) => [key.trim(), Number(value)])
		)
		const te = by.te ?? plain[0] ?? 1
		return {
			start: match.index,
			end: match.index + match[0].length,
			name: name.trim(),
			te,
			unet: by.unet ?? plain[1] ?? te
		}
	})
}

/** @param {number} value */
const number = value => String(Math.round(value * 1000) / 1000)

/** @param {string} name @param {number} te @param {number} unet */
export const formatTag = (name, te, unet) =>
	te === unet ? `<lora:${name}:${number(te)}>` : `<lora:${name}:te=${number(te)},unet=${number(unet)}>`

/** @param {string} prompt the prompt without its tags */
export const withoutTags = prompt =>
	prompt
		.replace(TAG, "")
		.replace(/[ \t]{2,}/g, " ")
		.trim()

/** @param {string} prompt @param {number} index @param {Pick<Tag, "te" | "unet">} strengths */
export function setTag(prompt, index, {te, unet}) {
	const tag = parseTags(prompt)[index]
	return prompt.slice(0, tag.start) + formatTag(tag.name, te, unet) + prompt.slice(tag.end)
}

/** @param {string} prompt @param {string} name @param {number} strength */
export const addTag = (prompt, name, strength) =>
	`${prompt.trimEnd()}${prompt.trim() ? " " : ""}${formatTag(name, strength, strength)}`

/** @param {string} prompt @param {number} index */
export function removeTag(prompt, index) {
	const tag = parseTags(prompt)[index]
	return `${prompt.slice(0, tag.start).trimEnd()} ${prompt.slice(tag.end).trimStart()}`.trim()
}

/** Reorder the tags; the text between them stays. @param {string} prompt @param {number} from @param {number} to */
export function moveTag(prompt, from, to) {
	const tags = parseTags(prompt)
	const texts = tags.map(tag => prompt.slice(tag.start, tag.end))
	texts.splice(to, 0, ...texts.splice(from, 1))
	let result = ""
	let at = 0
	tags.forEach((tag, index) => {
		result += prompt.slice(at, tag.start) + texts[index]
		at = tag.end
	})
	return result + prompt.slice(at)
}

/**
 * How a prompt names a LoRA: by its name, or by its id if the name is not valid in a tag or not unique.
 * @param {Lora} lora @param {Lora[] | null} loras
 */
export function tagName(lora, loras) {
	const speakable = /^[^<>:\s](?:[^<>:]*[^<>:\s])?$/.test(lora.name)
	const unique = (loras ?? []).filter(each => each.name === lora.name).length <= 1
	return speakable && unique ? lora.name : lora.id
}

/** Words without LoRA tags: a click on a word never adds a LoRA. @param {Lora} lora @param {boolean} dataset */
function wordsOf(lora, dataset) {
	const sources = lora.triggers.filter(({source}) => source.startsWith("ss_") === dataset)
	const words = sources.flatMap(trigger => trigger.words.map(withoutTags))
	return [...new Set(words)].filter(word => word && !/<(lora|lyco)/i.test(word))
}

/** The words that a file declares as its triggers, best source first. @param {Lora} lora */
export const triggerWords = lora => wordsOf(lora, false)

/** The most frequent tags of the training images, which need not trigger anything. @param {Lora} lora */
export const datasetTags = lora => wordsOf(lora, true)

/** Whether a prompt has a word, as a whole. @param {string} prompt @param {string} word */
export function hasWord(prompt, word) {
	const text = withoutTags(prompt).toLowerCase()
	return (
		text.split(/[,.;()[\]]+/).some(part => part.trim() === word.toLowerCase()) ||
		` ${text} `.includes(` ${word.toLowerCase()} `)
	)
}

/** Add a word at the end of the text, before the tags; or remove it. @param {string} prompt @param {string} word */
export function toggleWord(prompt, word) {
	if (hasWord(prompt, word)) {
		const escaped = word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")
		return prompt
			.replace(new RegExp(`(^|,\\s*|\\s)${escaped}(?=$|[\\s,<])`, "i"), "")
			.replace(/^\s*,\s*/, "")
			.replace(/\s{2,}/g, " ")
	}
	const first = parseTags(prompt)[0]?.start ?? prompt.length
	const text = prompt.slice(0, first).trimEnd()
	return `${text}${text ? ", " : ""}${word}${first < prompt.length ? ` ${prompt.slice(first)}` : ""}`
}
