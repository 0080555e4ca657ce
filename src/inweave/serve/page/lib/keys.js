// Keyboard shortcuts, in one list that the ? sheet shows:
//   "mod+Enter"  Ctrl on most systems, Cmd on a Mac; works while typing too
//   "g"          single keys do not work while typing, and can be switched off
import {useEffect, useRef} from "./dom.js"
import {createStore, persisted} from "./store.js"

const stored = persisted("single-keys", true)
/** @type {Store<{ list: Shortcut[], singleKeys: boolean }>} */
export const shortcuts = createStore({list: /** @type {Shortcut[]} */ ([]), singleKeys: stored.read()})

/** @param {boolean} on */
export function allowSingleKeys(on) {
	stored.write(on)
	shortcuts.set({singleKeys: on})
}

const isMac = /mac|iphone|ipad/i.test(navigator.platform)

/**
 * Offer shortcuts as long as the component is shown; later ones win.
 * @param {string} group their heading in the sheet
 * @param {ShortcutRow[]} list
 */
export function useShortcuts(group, list) {
	const newest = useRef(list)
	newest.current = list
	const names = list.map(([keys]) => keys).join(" ")
	useEffect(() => {
		const offered = newest.current.map(([keys, label, , textOwn], index) => {
			return {
				keys,
				label,
				group,
				textOwn,
				run: /** @type {Shortcut["run"]} */ (event => newest.current[index]?.[2](event))
			}
		})
		shortcuts.set(state => ({list: [...state.list, ...offered]}))
		return () => shortcuts.set(state => ({list: state.list.filter(each => !offered.some(own => own === each))}))
	}, [names])
}

/** @param {EventTarget | null} target */
function isTyping(target) {
	if (!(target instanceof HTMLElement)) return false
	if (target.isContentEditable || target.matches("textarea, select")) return true
	return target instanceof HTMLInputElement && !["checkbox", "radio", "range", "button"].includes(target.type)
}

addEventListener("keydown", event => {
	if (event.defaultPrevented || event.isComposing || event.altKey) return
	const mod = isMac ? event.metaKey : event.ctrlKey
	if (document.querySelector("dialog[open]") || (!mod && (event.ctrlKey || event.metaKey))) return
	if (!mod && (isTyping(event.target) || !shortcuts.get().singleKeys)) return
	// Enter, space and arrows belong to the focused control; letters do not
	if (
		!mod &&
		event.key.length > 1 &&
		event.target instanceof HTMLElement &&
		event.target.matches("button, a, input, [role]")
	)
		return
	const key = event.key === "=" ? "+" : event.key // plus without Shift
	const keys = (mod ? "mod+" : "") + (key.length === 1 && mod ? key.toLowerCase() : key)
	const match = shortcuts.get().list.findLast(each => each.keys === keys)
	if (!match || (match.textOwn && isTyping(event.target))) return
	event.preventDefault()
	match.run(event)
})

/** @type {Labels} */
const KEY_NAMES = {mod: isMac ? "⌘" : "Ctrl", ArrowLeft: "←", ArrowRight: "→", Escape: "Esc"}

/** Keys as people write them. @param {string} keys */
export const keyNames = keys =>
	keys
		.split(/(?<=.)\+/)
		.map(key => KEY_NAMES[key] ?? key.toUpperCase().replace("ENTER", "Enter").replace("DELETE", "Del"))
