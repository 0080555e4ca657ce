// Reference images: what an edit model sees beside the prompt, in order. They are uploads, by their ids in the form.
import {api, Button, DropZone, html, showError, toast, useBusy, useState, useStore} from "../../kit.js"
import {namesIn} from "./draft.js"
import {t} from "./strings.js"

/** @param {{ draft: DraftStore, most: number }} props most: images that the model reads */
export function References({draft, most}) {
	const ids = namesIn(useStore(draft).references)
	const [busy, during] = useBusy()
	/** @param {(ids: string[]) => string[]} change */
	const change = change =>
		draft.set(state => {
			const next = change(namesIn(state.references))
			return {references: next.length ? JSON.stringify(next) : undefined}
		})
	/** @param {File[]} files */
	const add = async files => {
		const room = most - ids.length
		for (const file of files.slice(0, room)) {
			const {id} = await api("/v1/uploads", {method: "POST", body: file})
			change(all => [...all, id])
		}
		if (files.length > room) toast(t.tooManyReferences(most), {kind: "warning"})
	}
	/** @param {number} at */
	const earlier = at => change(all => all.toSpliced(at - 1, 2, all[at], all[at - 1]))
	return html`<section class="stack stack-2" aria-labelledby="references-title">
		<h2 id="references-title" class="section-title">${t.references}</h2>
		${
			ids.length > 0 &&
			html`<ol class="references">
			${ids.map(
				(
					id,
					at
				) => html`<${Reference} key=${id} id=${id} number=${at + 1} onEarlier=${at ? () => earlier(at) : undefined}
					onRemove=${() => change(all => all.filter(each => each !== id))} />`
			)}
		</ol>`
		}
		${ids.length < most && html`<${DropZone} onFiles=${files => !busy && during(add(files)).catch(showError)} accept="image/*" multiple compact icon="image" label=${t.addReferences} />`}
		<p class="small muted">${t.referencesHint(most)}</p>
	</section>`
}

/** @param {{ id: string, number: number, onEarlier?: () => void, onRemove: () => void }} props */
function Reference({id, number, onEarlier, onRemove}) {
	const [gone, setGone] = useState(false)
	return html`<li class="reference">
		${
			gone
				? html`<span class="badge badge-bad">${t.referenceGone}</span>`
				: html`<img src=${`/v1/uploads/${encodeURIComponent(id)}/file`} alt=${t.reference(number)} onError=${() => setGone(true)} />`
		}
		<span class="row">
			${onEarlier && html`<${Button} kind="quiet" size="small" icon="previous" label=${t.earlier(number)} onClick=${onEarlier} />`}
			<${Button} kind="quiet" size="small" icon="trash" label=${t.removeReference(number)} onClick=${onRemove} />
		</span>
	</li>`
}
