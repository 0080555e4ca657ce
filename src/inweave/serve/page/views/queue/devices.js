// What runs the jobs: devices, on the machines of a cluster if there are several, with what each holds in memory.
import {api, app, cx, html, nameOf, printable, useEffect, useState, useStore} from "../../kit.js"
import {t} from "./strings.js"
import {titleOf} from "./title.js"

/** milliseconds between two looks */
const PAUSE = 2000
/** as many waiting jobs as the worker explains at once */
const LIMIT = 1000
/** CSS classes by status. @type {Labels} */
const STATUS = {running: "badge-active", ready: "badge-good", failed: "badge-bad"}

/**
 * Devices, machines, and why each job waits; kept up to date while the view is open.
 * @param {number} waiting jobs that the view lists
 */
export function useQueue(waiting) {
	const [queue, setQueue] = useState(
		/** @type {{ devices: Device[], nodes: ClusterNode[], reasons: Record<string, string> }} */ ({
			devices: [],
			nodes: [],
			reasons: {}
		})
	)
	useEffect(() => {
		const stop = new AbortController()
		const look = async () => {
			if (document.hidden || app.get().session !== "open") return
			const query = {limit: Math.min(LIMIT, Math.max(1, waiting))}
			/** @type {Queue} */
			const {devices, nodes, waiting: jobs} = await api("/v1/queue", {query, signal: stop.signal})
			setQueue({devices, nodes, reasons: Object.fromEntries(jobs.map(job => [job.id, job.reason]))})
		}
		const quietly = () => look().catch(() => {}) // the frame says that the worker cannot be reached
		quietly()
		const timer = setInterval(quietly, PAUSE)
		return () => {
			clearInterval(timer)
			stop.abort()
		}
	}, [waiting])
	return queue
}

/** @param {{ devices: Device[], nodes: ClusterNode[], jobs: Job[] }} props jobs: those that run */
export function Devices({devices, nodes, jobs}) {
	const homeless = devices.filter(device => !nodes.some(node => node.name === device.node))
	return html`<section>
		<h2>${t.devices} <span class="muted num">${devices.length}</span></h2>
		${nodes.map(
			node => html`<div key=${node.name} class="queue-node">
				<h3>
					<span class="clip">${node.name}</span>
					<span class="muted num">${t.resources(node)}</span>
					${!node.alive && html`<span class="badge badge-bad">${t.gone}</span>`}
				</h3>
				<${List} devices=${devices.filter(device => device.node === node.name)} jobs=${jobs} />
			</div>`
		)}
		${
			homeless.length > 0 &&
			html`<div class="queue-node">
				${nodes.length > 0 && html`<h3>${t.unplaced}</h3>`}
				<${List} devices=${homeless} jobs=${jobs} />
			</div>`
		}
	</section>`
}

/** @param {{ devices: Device[], jobs: Job[] }} props */
const List = ({devices, jobs}) =>
	devices.length > 0 &&
	html`<ul class="stack stack-2 queue-list">
		${devices.map(device => html`<${Row} key=${device.name} device=${device} jobs=${jobs} />`)}
	</ul>`

/** @param {{ device: Device, jobs: Job[] }} props */
function Row({device, jobs}) {
	useStore(app).loras // names of LoRAs
	const job = jobs.find(each => each.id === device.job)
	const status = device.job ? "running" : device.status
	const held = [...device.models.map(printable), ...device.loras.map(nameOf)]
	return html`<li class="row queue-item queue-device card" data-device=${device.name}>
		<div class="grow stack queue-body">
			<p class="row wrap">
				<span class="queue-title">${device.name}</span>
				${device.device && device.device !== device.name && html`<span class="muted">${device.device}</span>`}
				<span class=${cx("badge", STATUS[status])}>${t.statuses[status]}</span>
				${device.role !== "mixed" && html`<span class="badge">${t.roles[device.role]}</span>`}
			</p>
			${job && html`<p class="clip">${titleOf(job)}</p>`}
			${!device.job && device.reason && html`<p class="queue-reason">${device.reason}</p>`}
			<p class="queue-facts">${held.length ? t.holds(held) : t.holdsNothing}</p>
		</div>
	</li>`
}
