// Numbers and times for people.

const number = new Intl.NumberFormat("en-US", {maximumFractionDigits: 2})
const relative = new Intl.RelativeTimeFormat("en-US", {numeric: "auto"})

/** @param {number} value */
export const decimal = value => number.format(value)

/** @param {number} value with two digits, as strengths are written */
export const strength = value => String(Math.round(value * 100) / 100)

/** @param {number} bytes */
export function bytes(bytes) {
	if (bytes < 1000) return `${bytes} B`
	const units = ["kB", "MB", "GB", "TB"]
	const power = Math.min(Math.floor(Math.log10(bytes) / 3), units.length)
	return `${(bytes / 1000 ** power).toPrecision(3).replace(/\.0+$/, "")} ${units[power - 1]}`
}

/** @param {number} seconds 75 -> 1 min 15 s */
export function duration(seconds) {
	if (seconds < 10) return `${Math.max(0, seconds).toFixed(1)} s`
	if (seconds < 90) return `${Math.round(seconds)} s`
	if (seconds < 5400) return `${Math.floor(seconds / 60)} min ${String(Math.round(seconds % 60)).padStart(2, "0")} s`
	return `${Math.floor(seconds / 3600)} h ${String(Math.round((seconds % 3600) / 60)).padStart(2, "0")} min`
}

/** @param {number} timestamp in seconds; 3 minutes ago */
export function ago(timestamp) {
	const seconds = timestamp - Date.now() / 1000
	for (const [unit, size] of /** @type {[Intl.RelativeTimeFormatUnit, number][]} */ ([
		["day", 86400],
		["hour", 3600],
		["minute", 60]
	])) {
		if (Math.abs(seconds) >= size) return relative.format(Math.round(seconds / size), unit)
	}
	return relative.format(0, "second")
}

/** A text with invisible and direction-changing characters escaped. @param {string} text */
export const printable = text =>
	text.replace(
		/[\p{Cc}\p{Cf}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu,
		each => `\\u${each.codePointAt(0)?.toString(16).padStart(4, "0")}`
	)
